"""Manifests: what a run was made from, so that it can be trusted, compared and reused."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nbformat

from epiviz.results import MANIFEST, write_text_atomically

PACKAGES = (
    "epiviz", "torch", "transformers", "tokenizers", "numpy", "pandas", "scipy", "statsmodels",
    "seaborn", "matplotlib", "plotly", "anywidget", "ipykernel", "papermill",
)  # fmt: skip


@dataclass(frozen=True)
class Manifest:
    """What a run was made from, and how it ended.

    Attributes
    ----------
    notebook : str
        The notebook's path, as it was given.
    folder : Path
        Where the run lies. Not stored: a folder may move.
    parameters : dict
        All parameters, defaults included.
    notebook_sha256, source_sha256 : str
        Hashes of the notebook's cells and of the package's source files.
    versions : dict
        Python and the main packages.
    status : str
        "planned", "running", "done", "failed" or "stopped" (by Ctrl-C).
    started, finished : str
        UTC, ISO 8601.
    error : dict
        Type, message, cell number and traceback file of a failed run.
    finding : str
        What the notebook recorded as its finding.
    outputs : list of str
        Files in the folder, relative to it.
    reused : bool
        The run is from an earlier call. Not stored.
    """

    notebook: str
    folder: Path
    parameters: dict[str, Any]
    notebook_sha256: str
    source_sha256: str
    versions: dict[str, str]
    status: str = "planned"
    started: str | None = None
    finished: str | None = None
    seconds: float | None = None
    error: dict[str, Any] | None = None
    finding: str | None = None
    outputs: list[str] = field(default_factory=list)
    reused: bool = False

    @property
    def stem(self) -> str:
        """The notebook's name without folder and suffix."""
        return Path(self.notebook).stem

    @property
    def key(self) -> str:
        """Hash of everything that decides the result. ``out_dir`` does not."""
        parameters = {name: value for name, value in self.parameters.items() if name != "out_dir"}
        parts = [self.notebook_sha256, self.source_sha256, self.versions, parameters]
        return _sha256(json.dumps(parts, sort_keys=True))

    def save(self) -> None:
        """Write ``manifest.json`` into the run's folder, atomically."""
        stored = {name: value for name, value in asdict(self).items() if name not in ("folder", "reused")}
        write_text_atomically(self.folder / MANIFEST, json.dumps(stored, indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, folder: str | os.PathLike) -> Manifest:
        """Read the manifest of a run's folder.

        Raises
        ------
        FileExistsError
            The folder belongs to something else: its ``manifest.json`` is not one of ours.
        """
        path = Path(folder) / MANIFEST
        known = {each.name for each in fields(cls)} - {"folder", "reused"}
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            return cls(folder=Path(folder), **{name: stored[name] for name in known & set(stored)})
        except (ValueError, TypeError) as error:
            raise FileExistsError(
                f"{path} is not the manifest of a run; choose another folder, or remove it"
            ) from error


def notebook_hash(notebook: str | os.PathLike) -> str:
    """Hash the cells of a notebook: kinds, sources and tags, not outputs or other metadata."""
    cells = nbformat.read(notebook, as_version=4).cells
    parts = [[cell.cell_type, cell.source, sorted(cell.metadata.get("tags", []))] for cell in cells]
    return _sha256(json.dumps(parts))


def source_hash() -> str:
    """Hash the source files of the package as it lies on disk."""
    package = Path(__file__).parent
    sources = sorted(path for path in package.rglob("*") if path.suffix in (".py", ".js", ".css", ".json"))
    digest = hashlib.sha256()
    for path in sources:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what a notebook computes and shows."""
    python = ".".join(map(str, sys.version_info[:3]))
    return {"python": python} | {package: version(package) for package in PACKAGES}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
