"""Calibration of ThinKV: the attention sparsities that tell one kind of thought from another, found for one model.

The paper (arXiv 2510.01290) estimates the density of the sparsity in each layer over some reasoning texts, keeps four
layers in which it has three modes, and averages the two valleys between these over the layers. Not every model is so
obliging: where modes are missing, or hold a handful of tokens, the density is looked at through narrower and narrower
bandwidths, and the layers count that show three modes of some weight at the widest one. What that took is written down
beside the thresholds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from scipy.signal import find_peaks
from scipy.stats import gaussian_kde

from epiviz import policies
from epiviz.engine import Session, make_rows
from epiviz.models import Model
from epiviz.policies.base import Needs, New
from epiviz.policies.thinkv import EXECUTION, LAYERS, REASONING, TRANSITION, Thresholds, attention_sparsity, classify
from epiviz.results import write_text_atomically
from epiviz.trace import CHUNK, Trace

GRID = np.linspace(0, 1, 1001)
BANDWIDTHS = np.arange(20, 3, -1) / 20  # shares of Scott's bandwidth, the paper's own first
LEAST_SHARE = 0.1  # of all tokens, in a mode that counts


class CalibrationError(ValueError):
    """Sparsities in which no three kinds of thoughts can be told apart."""


@dataclass(frozen=True)
class Valleys:
    """The two valleys between three modes of a density.

    Attributes
    ----------
    low, high : float
    bandwidth : float
        Share of Scott's bandwidth at which the modes showed; 1 is the paper's.
    depth : float
        How far the shallower valley lies below the lower of its two modes, as a share of it.
    """

    low: float
    high: float
    bandwidth: float
    depth: float


@dataclass(frozen=True)
class Calibration:
    """Thresholds, and what they were made from.

    Attributes
    ----------
    thresholds : Thresholds
    valleys : dict of int to Valleys
        Of the chosen layers.
    shares : dict of str to float
        How much of the texts each kind of thought is, by these thresholds.
    tokens : int
    traces : dict of str to str
        Fingerprints by name.
    """

    thresholds: Thresholds
    valleys: dict[int, Valleys]
    shares: dict[str, float]
    tokens: int
    traces: dict[str, str]

    def __str__(self) -> str:
        found, narrowest = self.thresholds, min(each.bandwidth for each in self.valleys.values())
        layers = ", ".join(map(str, found.layers))
        shares = ", ".join(f"{share:.0%} {name}" for name, share in self.shares.items())
        return (
            f"{found.model}: execution below {found.low:.3f}, transition from {found.high:.3f} on\n"
            f"layers {layers}, on average; they show three modes at {narrowest:.2f} of Scott's bandwidth (paper: 1)\n"
            f"{self.tokens} tokens: {shares}"
        )

    def save(self, path: Path, command: str) -> None:
        """Write the thresholds into a file of thresholds, in place of older ones of the same model."""
        found = self.thresholds
        entries = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        entries[found.model] = {
            "depth": found.depth,
            "layers": list(found.layers),
            "low": round(found.low, 4),
            "high": round(found.high, 4),
            "made_from": {
                "command": command,
                "traces": self.traces,
                "tokens": self.tokens,
                "shares": {name: round(share, 3) for name, share in self.shares.items()},
                "valleys": {
                    layer: {name: round(value, 4) for name, value in asdict(each).items()}
                    for layer, each in self.valleys.items()
                },
                "versions": {package: version(package) for package in ("epiviz", "torch", "transformers", "scipy")},
            },
        }
        write_text_atomically(path, json.dumps(dict(sorted(entries.items())), indent=1) + "\n")


class SparsityRecorder:
    """Collects the attention sparsity of every token after the prompt, in every layer that evicts."""

    needs = Needs(rows=True)

    def __init__(self, layers: int):
        self.layers = layers
        self.passes: list[torch.Tensor] = []

    def observe(self, new: New, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        if not new.prompt:
            layers = [attention_sparsity(new.rows(layer), new.visible)[0] for layer in range(self.layers)]
            self.passes.append(torch.stack(layers).cpu())


def sparsities(model: Model, trace: Trace) -> np.ndarray:
    """Let the model read a trace with the full cache; return each token's sparsity ``[layers, tokens after prompt]``.

    Raises
    ------
    ForeignTraceError
        The trace's ids mean something else to this model.
    """
    trace.check_model(model)
    prompt, rest = trace.tokens[: trace.prompt_length].tolist(), trace.tokens[trace.prompt_length :]
    recorder, nothing = SparsityRecorder(len(model.shape.evicts)), policies.get("full")
    tokens = torch.tensor(rest, dtype=torch.int64, device=model.device)[None]
    rows = make_rows([prompt], nothing, None, len(rest))
    with Session(model, nothing, rows, len(rest), 0, recorder=recorder) as session:
        session.prefill()
        for chunk in tokens.split(CHUNK, dim=1):
            session.feed(chunk)
    return torch.cat(recorder.passes, dim=1).numpy()


def find_valleys(sparsity: np.ndarray) -> Valleys | None:
    """Return the valleys between three modes, at the widest bandwidth that shows three; None if none does.

    Modes that hold less than :data:`LEAST_SHARE` of the tokens do not count.
    """
    if not np.ptp(sparsity):
        return None
    for bandwidth in BANDWIDTHS:
        density = gaussian_kde(sparsity, lambda kde, share=bandwidth: share * kde.scotts_factor())(GRID)
        modes = list(find_peaks(np.concatenate([[0], density, [0]]))[0] - 1)  # a mode may lie at either end
        while True:
            between = [a + int(density[a : b + 1].argmin()) for a, b in pairwise(modes)]
            held = np.histogram(sparsity, [-np.inf, *GRID[between], np.inf])[0] / sparsity.size
            if len(modes) <= 3 or held.min() >= LEAST_SHARE:
                break
            del modes[int(held.argmin())]
        if len(modes) == 3 and held.min() >= LEAST_SHARE:
            depth = min(1 - density[v] / min(density[modes[i]], density[modes[i + 1]]) for i, v in enumerate(between))
            low, high = GRID[between].tolist()
            return Valleys(low, high, float(bandwidth), float(depth))
    return None


def calibrate(model: Model, traces: Sequence[Trace]) -> Calibration:
    """Find a model's thresholds from texts that it wrote or reads.

    Of all layers the four count whose three modes show at the widest bandwidth, and of equal ones those with the
    deepest valleys.

    Raises
    ------
    CalibrationError
        No layer shows three modes, or the layers' averages leave no reasoning between them.
    """
    measured = np.concatenate([sparsities(model, trace) for trace in traces], axis=1)
    found = {layer: valleys for layer, row in enumerate(measured) if (valleys := find_valleys(row)) is not None}
    if not found:
        raise CalibrationError(
            f"the sparsity of {measured.shape[1]} tokens shows no three modes in any of the {len(measured)} layers; "
            "give more or longer traces, or use thresholds='tertiles'"
        )
    best = sorted(found, key=lambda layer: (-found[layer].bandwidth, -found[layer].depth, layer))[:LAYERS]
    chosen = {layer: found[layer] for layer in sorted(best)}
    low, high = (float(np.mean([getattr(v, name) for v in chosen.values()])) for name in ("low", "high"))
    thresholds = Thresholds(model.name, len(measured), tuple(chosen), low, high)
    kinds = classify(torch.from_numpy(measured[list(chosen)].mean(0)), low, high)
    names = {"execution": EXECUTION, "reasoning": REASONING, "transition": TRANSITION}
    shares = {name: float((kinds == kind).double().mean()) for name, kind in names.items()}
    return Calibration(thresholds, chosen, shares, measured.shape[1], {t.name: t.fingerprint for t in traces})
