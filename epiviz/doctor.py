"""The doctor: what this machine has, what really runs on it, and what a missing piece means."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from epiviz import devices
from epiviz.manifest import commit, versions

GOOD, MISSING, BAD = "ok", "--", "!!"
LOW_DISK = 5  # GB
EXTRAS = {
    "flash-attn": "attention on a GPU goes through PyTorch's own kernels",
    "datasets": "public problem sets are read from a local copy (path=…) only",
    "ray": "sweeps run on this machine or through Slurm, not on a Ray cluster",
    "submitit": "sweeps run on this machine or on a Ray cluster, not through Slurm",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes
    ----------
    state : str
        "ok", "--" (an optional piece is missing) or "!!" (something that is needed does not work).
    what, told : str
        What was looked at, and what was found; for a missing piece also what that means.
    """

    state: str
    what: str
    told: str

    def __str__(self) -> str:
        return f"{self.state}  {self.what}: {self.told}"


def examine() -> Iterator[Finding]:
    """Look at everything, one finding after the other; importing torch takes the first seconds."""
    for look in (_versions, _extras, _devices, _attention, _widgets, _kernel, _model_cache, _disk):
        yield from look()


def _versions() -> Iterator[Finding]:
    told = ", ".join(f"{name} {number}" for name, number in versions().items())
    yield Finding(GOOD, "versions", f"{told}; source {commit() or 'installed, no clone'}")


def _extras() -> Iterator[Finding]:
    for package, meaning in EXTRAS.items():
        try:
            yield Finding(GOOD, package, version(package))
        except PackageNotFoundError:
            yield Finding(MISSING, package, f"not installed: {meaning}")


def _devices() -> Iterator[Finding]:
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Finding(
        GOOD, "CPU", f"{devices.cores()} cores, {memory:.0f} GiB of memory, {torch.get_num_threads()} threads"
    )
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        yield Finding(GOOD, f"GPU {number}", f"{about.name}, {about.total_memory / 2**30:.0f} GiB")
    if not torch.cuda.is_available():
        built = f"torch {torch.__version__} is built " + (
            f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without"
        )
        seen = ", ".join(devices.gpu_names()) or "none"
        yield Finding(
            MISSING, "GPU", f"none that torch can use ({built}; the driver shows {seen}): models run on the CPU"
        )


def _attention() -> Iterator[Finding]:
    """Run each backend on a tiny tensor, where models would run."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query = torch.randn(1, 4, 16, 64, device=device, dtype=dtype)
    needed = {"eager": _eager, "sdpa": _sdpa(None)}
    fused = {
        f"sdpa, {kernel}": _sdpa(kernel) for kernel in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
    }
    expected = _eager(query)
    for name, attend in {**needed, **fused, "flash_attention_2": _flash}.items():
        what = f"attention {name.lower()} on {device}"
        try:
            error = (attend(query) - expected).abs().max().item()
        except (ImportError, RuntimeError, NotImplementedError, ValueError, AttributeError) as failure:
            why = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
            meaning = "models cannot run" if name in needed else "other kernels are used"
            yield Finding(BAD if name in needed else MISSING, what, f"does not run here ({why}): {meaning}")
        else:
            close = error < (0.05 if dtype == torch.bfloat16 else 1e-4)
            yield Finding(GOOD if close else BAD, what, f"runs, {error:.1g} from the plain formula in {dtype}")


def _eager(query):
    return ((query @ query.transpose(-1, -2)) * query.shape[-1] ** -0.5).softmax(-1) @ query


def _sdpa(kernel: str | None) -> Callable:
    def attend(query):
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backends = list(SDPBackend.__members__.values())[1:] if kernel is None else [SDPBackend.__members__[kernel]]
        with sdpa_kernel(backends):
            return torch.nn.functional.scaled_dot_product_attention(query, query, query)

    return attend


def _flash(query):
    attend = importlib.import_module("flash_attn").flash_attn_func
    turned = query.transpose(1, 2)
    return attend(turned, turned, turned).transpose(1, 2)


def _widgets() -> Iterator[Finding]:
    from jupyter_core.paths import jupyter_path

    for what, extension in {
        "widget manager of JupyterLab": "@jupyter-widgets/jupyterlab-manager",
        "anywidget in JupyterLab": "anywidget",
    }.items():
        found = [Path(folder, extension, "package.json") for folder in jupyter_path("labextensions")]
        found = [path for path in found if path.is_file()]
        if found:
            yield Finding(GOOD, what, json.loads(found[0].read_text(encoding="utf-8"))["version"])
        else:
            meaning = "views show their HTML version; install ipywidgets and anywidget where JupyterLab runs"
            yield Finding(MISSING, what, f"not found in this environment: {meaning}")


def _kernel() -> Iterator[Finding]:
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")  # as runs do
    try:
        program = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except NoSuchKernel:
        yield Finding(
            BAD, "kernel python3", "not found: notebooks cannot run; pip install ipykernel in this environment"
        )
        return
    # a bare name means the interpreter that starts it
    same = os.sep not in program or Path(program).parent == Path(sys.executable).parent
    meaning = f"{program} is another Python than {sys.executable}: notebooks would not see this epiviz"
    yield Finding(GOOD if same else BAD, "kernel python3", program if same else meaning)


def _model_cache() -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    from epiviz.models import cache_directory

    ours = cache_directory()
    bundled = [folder for folder in ours.glob("smollm2-135m-*") if (folder / "sha256").is_file()]
    told = (
        f"converted, in {bundled[0]}"
        if bundled
        else f"not in {ours} yet: fetched (93 MB) and converted at the first use"
    )
    yield Finding(GOOD if bundled else MISSING, "bundled model", told)
    models = sorted(
        folder.name.removeprefix("models--").replace("--", "/") for folder in Path(HF_HUB_CACHE).glob("models--*")
    )
    offline = " (HF_HUB_OFFLINE is set: nothing is fetched)" if HF_HUB_OFFLINE else ""
    yield Finding(
        GOOD if models else MISSING, "hub models", f"{', '.join(models) or 'none'} in {HF_HUB_CACHE}{offline}"
    )


def _disk() -> Iterator[Finding]:
    from epiviz.models import cache_directory

    for what, folder in {"disk here": Path.cwd(), "disk of the model cache": cache_directory()}.items():
        there = next(each for each in (folder, *folder.parents) if each.exists())
        free = shutil.disk_usage(there).free / 1e9
        writable = os.access(there, os.W_OK)
        meaning = "" if free > LOW_DISK else ": little for models and runs; EPIVIZ_CACHE and --out choose other places"
        state = GOOD if writable and free > LOW_DISK else BAD
        yield Finding(state, what, f"{free:.0f} GB free{meaning}" if writable else f"{there} cannot be written to")
