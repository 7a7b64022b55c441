"""Problems as batches of token ids: for training on their solutions, and for reading how well a model knows them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from scipy.stats import binomtest
from torch.nn import functional

from epiviz.models import Model
from epiviz.tasks.problems import Problem

IGNORED = -100  # the label of a token that no loss is taken of


def collate(problems: list[Problem], tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels, int64 ``[problems, tokens]``, padded on the right.

    A token's label is its successor. Tokens whose successor is of the prompt, or a pad, have none.
    """
    encoded = []
    for problem in problems:
        message = [{"role": "user", "content": problem.prompt}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        prompt, solution = tokenizer([text, problem.solution], add_special_tokens=False).input_ids
        encoded.append((prompt, [*solution, tokenizer.eos_token_id]))
    longest = max(len(prompt) + len(solution) for prompt, solution in encoded) - 1
    tokens = torch.full((len(problems), longest), tokenizer.pad_token_id)
    labels = torch.full((len(problems), longest), IGNORED)
    for row, (prompt, solution) in enumerate(encoded):
        whole = torch.tensor(prompt + solution)
        tokens[row, : len(whole) - 1] = whole[:-1]
        labels[row, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
    return tokens, labels


def labelled_logits(lm, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits ``[labelled, vocabulary]`` and the labels ``[labelled]`` of the tokens that have one.

    Rows are padded on the right, so that the causal rule alone hides the pads.
    """
    hidden = lm.model(input_ids=tokens, use_cache=False).last_hidden_state
    chosen = labels != IGNORED
    return lm.lm_head(hidden[chosen]), labels[chosen]


def length(problem: Problem) -> int:
    """Return the words of prompt and solution: with one token per word, what a batch counts."""
    return problem.meta["prompt_words"] + problem.meta["solution_words"]


def cut_by_length(problems: list[Problem], parts: int) -> list[list[Problem]]:
    """Cut problems, sorted by length, into parts of about as many words each: little of a part is padding."""
    problems = sorted(problems, key=length)
    totals = np.cumsum([length(problem) for problem in problems])
    cuts = np.searchsorted(totals, np.arange(1, parts) * totals[-1] / parts).tolist()
    return [problems[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(problems)], strict=True)]


@torch.inference_mode()
def score(model: Model, problems: list[Problem], batch_tokens: int = 8192) -> pd.DataFrame:
    """Return how well a model knows the solutions, teacher-forced, one row per problem.

    ``exact``: every token of the solution is the model's first choice, which is the case exactly if greedy decoding
    with a full cache writes this solution. ``lookups``: the share right among the tokens that read a value (``k6``).
    ``loss``: nats per token.
    """
    tokenizer = model.tokenizer
    words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    reads = torch.tensor(
        [len(word) == 2 and word[0].isalpha() and word[1].isdigit() and word[0].islower() for word in words]
    )
    parts = -(-sum(map(length, problems)) // batch_tokens)
    rows = []
    for part in filter(None, cut_by_length(problems, parts)):
        tokens, labels = (tensor.to(model.device) for tensor in collate(part, tokenizer))
        logits, wanted = labelled_logits(model.lm, tokens, labels)
        chosen = (labels != IGNORED).cpu()
        right, losses = torch.zeros(chosen.shape, dtype=torch.bool), torch.zeros(chosen.shape)
        right[chosen] = (logits.argmax(-1) == wanted).cpu()
        losses[chosen] = functional.cross_entropy(logits.float(), wanted, reduction="none").cpu()
        is_read = chosen & reads[labels.clamp_min(0).cpu()]
        for row, problem in enumerate(part):
            rows.append(
                {
                    "id": problem.id,
                    **{name: problem.meta[name] for name in ("kind", "statements", "look_back")},
                    "exact": bool(right[row][chosen[row]].all()),
                    "lookups": float(right[row][is_read[row]].float().mean()),
                    "loss": float(losses[row].sum() / chosen[row].sum()),
                    "tokens": int(chosen[row].sum()),
                }
            )
    return pd.DataFrame(rows)


def by_size(scores: pd.DataFrame) -> pd.DataFrame:
    """Return, per number of lines, how many problems were exact, with a Wilson interval, and the other means."""
    rows = []
    for statements, part in scores.groupby("statements"):
        low, high = binomtest(int(part["exact"].sum()), len(part)).proportion_ci(method="wilson")
        means = {name: float(part[name].mean()) for name in ("lookups", "loss", "tokens", "look_back")}
        row = {"statements": statements, "n": len(part), "exact": float(part["exact"].mean())}
        rows.append({**row, "low": low, "high": high, **means})
    return pd.DataFrame(rows)


def unigram_loss(known: list[Problem], unseen: list[Problem], tokenizer) -> float:
    """Return the nats per solution token of a model that only knows how often each token occurs in ``known``."""
    counts = np.ones(len(tokenizer))  # add-one smoothing
    for labels in (collate([problem], tokenizer)[1] for problem in known):
        np.add.at(counts, labels[labels != IGNORED].numpy(), 1)
    surprisal = -np.log(counts / counts.sum())
    tokens = torch.cat([collate([problem], tokenizer)[1].flatten() for problem in unseen])
    return float(surprisal[tokens[tokens != IGNORED].numpy()].mean())
