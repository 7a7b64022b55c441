"""What a measurement depends on."""

from __future__ import annotations

import datetime
import os
import platform
from typing import TYPE_CHECKING

import torch

from epiviz.manifest import versions

if TYPE_CHECKING:
    from epiviz.models import Model


def machine() -> dict[str, object]:
    """Return date, processor, cores and versions."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "versions": versions(),
    }


def environment(model: Model) -> dict[str, object]:
    """Return what a measurement with a model depends on: machine, threads, model and versions."""
    here = machine()
    if model.device.type == "cuda":
        here["device"] = torch.cuda.get_device_name()
    lm = {"model": model.name, "dtype": str(model.dtype).removeprefix("torch."), "attention": model.attention}
    return here | {"threads": torch.get_num_threads()} | lm
