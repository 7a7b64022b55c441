"""Positions after eviction: what a new token is rotated by, and whether kept keys are rotated again.

* ``absolute``: the next position is the number of tokens seen; kept keys keep their rotation. The default.
* ``cache-relative``: the next position is the number of slots held; kept keys keep their rotation. This is what a
  harness does that hands a shortened cache to a model without positions: after the first overflow, new tokens share
  few positions with each other, or just one.
* ``rerotated``: as above, and kept keys are rotated to their new slot, so that positions inside the cache are always
  0 … held − 1 (StreamingLLM, arXiv 2309.17453, section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epiviz.choices import check_choice
from epiviz.models import Model, UnsupportedModelError
from epiviz.signals import at_least_float32

MODES = ("absolute", "cache-relative", "rerotated")
LENGTH_DEPENDENT = ("dynamic", "longrope")  # their frequencies change with the length, so a rotation cannot be undone


@dataclass(frozen=True)
class Rotary:
    """The rotation of a model's keys.

    Attributes
    ----------
    frequencies : float64 ``[rotated channels / 2]``
    layers : tuple of bool
        Which of the evicting layers rotate at all.
    """

    frequencies: torch.Tensor
    layers: tuple[bool, ...]

    @classmethod
    def of(cls, model: Model) -> Rotary:
        """Read a model's rotation; raise :class:`UnsupportedModelError` if keys cannot be rotated again."""
        kind = (getattr(model.lm.config, "rope_parameters", None) or {}).get("rope_type")
        embedding = getattr(model.lm.get_decoder(), "rotary_emb", None)
        if kind in LENGTH_DEPENDENT:
            raise UnsupportedModelError(
                f"{model.name!r} uses {kind!r} rotary positions, whose frequencies depend on the length: kept keys "
                "cannot be rotated again. Use positions='absolute' or 'cache-relative'"
            )
        if kind is None or not isinstance(getattr(embedding, "inv_freq", None), torch.Tensor):
            raise UnsupportedModelError(
                f"{model.name!r} ({model.lm.config.model_type}) has no single rotary embedding for all layers; use "
                "positions='absolute'"
            )
        rotates = [bool(getattr(layer.self_attn, "use_rope", True)) for layer in model.decoder_layers]
        return cls(embedding.inv_freq.double(), tuple(rotates[layer] for layer in model.shape.evicts))

    def rotate(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """Rotate keys or queries ``[…, head_dim]`` further by ``by`` ``[…]`` positions; may be negative."""
        angle = by[..., None].double() * self.frequencies.to(x.device)
        cos, sin = angle.cos(), angle.sin()
        first, second, rest = at_least_float32(x).split(
            [len(self.frequencies), len(self.frequencies), x.shape[-1] - 2 * len(self.frequencies)], dim=-1
        )
        cos, sin = cos.to(first.dtype), sin.to(first.dtype)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)


def check_mode(mode: str) -> str:
    """Return ``mode``, or raise ValueError naming the known ones."""
    return check_choice("positions", mode, MODES)
