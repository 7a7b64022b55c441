"""Devices: which processors a run may use, told without importing torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from functools import cache
from importlib.metadata import version

VISIBLE = "CUDA_VISIBLE_DEVICES"


def cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def gpu_names() -> tuple[str, ...]:
    """Return the names of this machine's NVIDIA GPUs; none where torch is built for CPUs."""
    if shutil.which("nvidia-smi") is None or "+cpu" in version("torch"):
        return ()
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False)
    return tuple(told.stdout.split("\n")[:-1]) if told.returncode == 0 else ()


def visible_gpus() -> list[str]:
    """Return what ``CUDA_VISIBLE_DEVICES`` lets this process see, or the numbers of all GPUs."""
    names = gpu_names()
    chosen = os.environ.get(VISIBLE)
    if not names or chosen is None:
        return [str(number) for number in range(len(names))]
    return [each.strip() for each in chosen.split(",") if each.strip()]


def describe() -> str:
    """Return what a run started here computes on.

    Examples
    --------
    >>> "CPU" in describe() or "GPU" in describe()
    True
    """
    names, visible = gpu_names(), visible_gpus()
    if not visible:
        return f"CPU, {cores()} cores, {platform.machine()}"
    # a UUID or an index beyond what nvidia-smi lists is told as it is
    known = {str(number): name for number, name in enumerate(names)}
    return ", ".join(f"GPU {each} ({known.get(each, 'NVIDIA')})" for each in visible)
