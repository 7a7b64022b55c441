"""Training of a small reasoning model on problems of :mod:`epiviz.tasks`: one plain loop, resumable."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn import functional

from epiviz.decode import progress_bar
from epiviz.models import Model
from epiviz.results import write_atomically
from epiviz.tasks.batches import IGNORED, collate, cut_by_length, labelled_logits, length, score
from epiviz.tasks.problems import Problem
from epiviz.tasks.steps import KINDS, MAX_CARRY_FREE, MAX_LABEL, load_steps, make_problem, vocabulary, word_parts
from epiviz.tasks.words import word_tokenizer

CHECKPOINT = "checkpoint.safetensors"
METRICS = "metrics.csv"
POOL = 16  # batches that are drawn together and cut by length


@dataclass(frozen=True)
class Stage:
    """From step ``start`` on, problems of ``statements`` (smallest, largest) executed lines.

    ``batch_tokens`` is the mean number of tokens in a batch, prompts included. Small batches suffice at first: what
    has to happen is that heads form which look things up, and that takes steps rather than tokens. ``carry_free`` is
    the share of problems of at most 7 lines in which no result is taken mod 10: there a result grows with its operands,
    so that guesses get better before they are right. Of sums mod 10 alone nothing is learnt for millions of tokens.
    """

    start: int
    statements: tuple[int, int]
    batch_tokens: int = 1024
    carry_free: float = 0.0


@dataclass(frozen=True)
class TrainingPlan:
    """Everything but the device that decides what comes out of a training.

    The learning rate warms up, stays, and falls linearly to 0 over the last ``decay`` (a share) of all steps. Until it
    falls, a plan of more steps, or with other later stages, continues the same training.
    """

    steps: int
    stages: tuple[Stage, ...]
    architecture: str = "llama"
    hidden: int = 128
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 256
    initializer_range: float = 0.05
    max_tokens: int = 4096
    learning_rate: float = 1.5e-3
    warmup: int = 100
    decay: float = 0.3
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    kinds: tuple[str, ...] = KINDS
    seed: int = 0

    def learning_rate_at(self, step: int) -> float:
        left = (self.steps - step) / (self.decay * self.steps)
        return self.learning_rate * min(1.0, (step + 1) / self.warmup, left)

    def stage_at(self, step: int) -> Stage:
        return [stage for stage in self.stages if stage.start <= step][-1]


# The tiny reasoner itself: an hour on two quiet cores. Look-ups and sums first, on short problems; longer ones follow.
TINY_REASONER = TrainingPlan(
    steps=4_600,
    stages=(
        Stage(0, (3, 12), carry_free=0.7),
        Stage(1000, (3, 12), batch_tokens=2048, carry_free=0.4),
        Stage(1600, (3, 24), batch_tokens=3072, carry_free=0.1),
        Stage(2800, (3, 40), batch_tokens=4096),
    ),
)
# A smaller twin that learns what a solution looks like within seconds: enough for a look at the training itself.
TWIN = TrainingPlan(
    steps=300,
    stages=(Stage(0, (3, 6)),),
    hidden=64,
    layers=4,
    intermediate=128,
    learning_rate=3e-3,
    warmup=20,
)
PLANS = {"smoke": replace(TWIN, steps=60), "demo": TWIN, "full": TINY_REASONER, "paper": TINY_REASONER}


def new_model(plan: TrainingPlan) -> Model:
    """Return an untrained model of the plan's shape, in float32, with the tokenizer of ``steps``."""
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[plan.architecture]
    tokenizer = word_tokenizer(vocabulary())
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=plan.hidden,
        intermediate_size=plan.intermediate,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads,
        num_key_value_heads=plan.kv_heads,
        head_dim=plan.hidden // plan.heads,
        max_position_embeddings=plan.max_tokens,
        tie_word_embeddings=True,
        initializer_range=plan.initializer_range,
        **special,
    )
    with torch.random.fork_rng():
        torch.manual_seed(plan.seed)
        lm = model_class(config).float()
        _compose_embeddings(lm.model.embed_tokens.weight, tokenizer, plan.initializer_range)
    lm.generation_config = transformers.GenerationConfig(**special)
    return Model(lm, tokenizer, "tiny-reasoner")


@torch.no_grad()
def _compose_embeddings(weight: torch.Tensor, tokenizer, spread: float) -> None:
    """Start the embedding of a composite word as the sum of its parts: what is learnt of one name holds for all."""
    words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    names = sorted({part for word in words for part in word_parts(word)})
    parts = dict(zip(names, torch.randn(len(names), weight.shape[1]) * spread, strict=True))
    for index, word in enumerate(words):
        own = [parts[part] for part in word_parts(word)]
        weight[index] = torch.stack(own).sum(0) / len(own) ** 0.5


def unseen(sizes: tuple[int, ...], n: int, seed: int = 0) -> Callable[[Model], dict[str, float]]:
    """Return what :func:`train` may evaluate: ``n`` unseen problems of each size, teacher-forced.

    The numbers per size (lines executed): ``exact_<size>``, ``lookups_<size>`` and ``loss_<size>``, the means of
    :func:`epiviz.tasks.batches.score`.
    """
    problems = {size: load_steps(n, seed, statements=size) for size in sizes}

    def evaluate(model: Model) -> dict[str, float]:
        scores = {size: score(model, problems[size]) for size in sizes}
        return {
            f"{name}_{size}": float(frame[name].mean())
            for size, frame in scores.items()
            for name in ("exact", "lookups", "loss")
        }

    return evaluate


def save(model: Model, folder: str | os.PathLike) -> str:
    """Write weights, config and tokenizer as transformers loads them; return the weights' SHA-256."""
    model.lm.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return hashlib.sha256((Path(folder) / "model.safetensors").read_bytes()).hexdigest()


class Batches:
    """The batches of a plan: step -> (tokens, labels), a pure function of plan and step."""

    def __init__(self, plan: TrainingPlan, tokenizer) -> None:
        self.plan, self.tokenizer = plan, tokenizer
        self._number, self._batches = -1, []

    def __call__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        number, place = divmod(step, POOL)
        if number != self._number:
            self._number, self._batches = number, self._draw(number)
        return collate(self._batches[place], self.tokenizer)

    def _draw(self, number: int) -> list[list[Problem]]:
        plan = self.plan
        rng = np.random.default_rng([plan.seed, number])
        stage = plan.stage_at(number * POOL)
        smallest, largest = stage.statements
        problems: list[Problem] = []
        words = 0
        while words < POOL * stage.batch_tokens:
            kind = plan.kinds[int(rng.integers(len(plan.kinds)))]
            easy = bool(rng.random() < stage.carry_free)
            top = min(largest, MAX_CARRY_FREE if easy else MAX_LABEL if kind == "chain" else largest)
            size, index = int(rng.integers(smallest, top + 1)), int(rng.integers(2**62))
            problems.append(make_problem(plan.seed, index, kind=kind, statements=size, split="train", carry_free=easy))
            words += length(problems[-1])
        batches = cut_by_length(problems, POOL)
        return [batches[place] for place in rng.permutation(POOL)]


def train(
    plan: TrainingPlan,
    folder: str | os.PathLike,
    *,
    evaluate: Callable[[Model], dict[str, float]] | None = None,
    checkpoint_every: int = 100,
    stop_at: int | None = None,
    workers: int = 1,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> Model:
    """Train a model, from the checkpoint in ``folder`` if there is one, and return it.

    Parameters
    ----------
    plan : TrainingPlan
    folder : str or path
        Gets ``checkpoint.safetensors`` (weights and optimiser state) and ``metrics.csv``, both replaced atomically.
    evaluate : callable, optional
        Model -> named numbers for the metrics.
    checkpoint_every : int
        Steps between checkpoints; at each the metrics gain a row.
    stop_at : int, optional
        Leave after this step; a later call continues.
    workers : int
        Threads that share the rows of a batch. On a CPU, two workers of one torch thread each wait less for each
        other than the two threads of one operation do.
    device : str, optional
        The first GPU if there is one, else the CPU.
    progress : bool
        Show a bar.
    """
    folder = Path(folder)
    model = new_model(plan)
    model.lm.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).train()
    optimizer = _optimizer(plan, model.lm)
    step, tokens, spent = _restore(folder / CHECKPOINT, model.lm, optimizer)
    rows = _rows_until(folder / METRICS, step)
    batches = Batches(plan, model.tokenizer)
    stop = plan.steps if stop_at is None else min(plan.steps, stop_at)
    started = time.monotonic() - spent
    losses: list[float] = []
    with (
        ThreadPoolExecutor(workers) as pool,
        progress_bar(stop, "training", progress, unit="step", initial=step) as bar,
    ):
        while step < stop:
            ids, labels = batches(step)
            for group in optimizer.param_groups:
                group["lr"] = plan.learning_rate_at(step)
            losses.append(_gradients(model, ids, labels, pool, workers))
            torch.nn.utils.clip_grad_norm_(model.lm.parameters(), plan.clip)
            optimizer.step()
            step, tokens = step + 1, tokens + ids.numel()
            bar.update()
            if step % checkpoint_every == 0 or step == stop:
                done = {"step": step, "tokens": tokens, "seconds": round(time.monotonic() - started, 1)}
                row = {**done, "statements": plan.stage_at(step - 1).statements[1], "loss": float(np.mean(losses))}
                if evaluate is not None:
                    model.lm.eval()
                    row |= evaluate(model)
                    model.lm.train()
                rows.append(row)
                losses.clear()
                bar.set_postfix(loss=f"{row['loss']:.3f}")
                write_atomically(
                    folder / METRICS, lambda path: pd.DataFrame(rows).to_csv(path, index=False, float_format="%.5g")
                )
                write_atomically(folder / CHECKPOINT, lambda path, done=done: _save(path, model.lm, optimizer, done))
    model.lm.eval()
    return model


def _gradients(model: Model, tokens, labels, pool: ThreadPoolExecutor, workers: int) -> float:
    """Set the gradient of the mean loss over a batch, summed over parts of its rows; return the loss."""
    parameters = list(model.lm.parameters())
    count = int((labels != IGNORED).sum())

    def of_part(part: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, tuple[torch.Tensor, ...]]:
        logits, wanted = labelled_logits(model.lm, *(tensor.to(model.device) for tensor in part))
        loss = functional.cross_entropy(logits, wanted, reduction="sum") / count
        return loss.item(), torch.autograd.grad(loss, parameters)

    parts = zip(tokens.tensor_split(workers), labels.tensor_split(workers), strict=True)
    losses, gradients = zip(*pool.map(of_part, [part for part in parts if len(part[0])]), strict=True)
    for parameter, shares in zip(parameters, zip(*gradients, strict=True), strict=True):
        parameter.grad = sum(shares[1:], shares[0])
    return sum(losses)


def _optimizer(plan: TrainingPlan, lm) -> torch.optim.AdamW:
    matrices = [parameter for parameter in lm.parameters() if parameter.ndim > 1]
    gains = [parameter for parameter in lm.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=plan.learning_rate, betas=plan.betas)


def _save(path: Path, lm, optimizer, done: dict) -> None:
    arrays = {f"model.{name}": value for name, value in lm.named_parameters()}
    for index, moments in optimizer.state_dict()["state"].items():
        arrays |= {f"optimizer.{index}.{name}": value for name, value in moments.items()}
    arrays = {name: value.detach().cpu().contiguous() for name, value in arrays.items()}
    save_file(arrays, path, metadata={name: str(value) for name, value in done.items()})


def _restore(path: Path, lm, optimizer) -> tuple[int, int, float]:
    """Read a checkpoint into model and optimiser, if there is one; return steps, tokens and seconds so far."""
    if not path.is_file():
        return 0, 0, 0.0
    parameters = dict(lm.named_parameters())
    moments: dict[int, dict[str, torch.Tensor]] = {}
    with safe_open(path, "pt") as file, torch.no_grad():
        for key in file.keys():  # noqa: SIM118  no mapping
            part, name = key.split(".", 1)
            if part == "model":
                parameters[name].copy_(file.get_tensor(key))
            else:
                index, moment = name.split(".")
                moments.setdefault(int(index), {})[moment] = file.get_tensor(key)
        done = file.metadata()
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    return int(done["step"]), int(done["tokens"]), float(done["seconds"])


def _rows_until(path: Path, step: int) -> list[dict]:
    """Return the metrics up to a checkpoint's step; later rows are written again."""
    if not path.is_file():
        return []
    frame = pd.read_csv(path)
    return frame[frame["step"] <= step].to_dict("records")
