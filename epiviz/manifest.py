"""Manifests: what a run was made from, so that it can be trusted, compared and reused."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nbformat

from epiviz.results import write_text_atomically

MANIFEST = "manifest.json"

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
    notebook_sha256, parameters_sha256, source_sha256 : str
        Hashes of the notebook's cells, of all parameters but ``out_dir``, and of the package's source files.
    versions : dict
        Python and the main packages.
    commit : str
        Of the package's repository, with a "+" where its files differ from it; None outside a clone.
    seed : int
        The parameter of that name, if there is one.
    host, device : str
        Where it ran, and on what.
    status : str
        "planned", "running", "done", "failed" or "stopped" (by Ctrl-C, or its process was killed).
    started, finished : str
        UTC, ISO 8601; ``seconds`` lie between them.
    error : dict
        Type, message, cell number and traceback file of a failed run.
    finding : str
        What the notebook recorded as its finding.
    outputs : dict of str to str
        The SHA-256 of each file in the folder, by its path in it.
    reused : bool
        The run is from an earlier call. Not stored.
    """

    notebook: str
    folder: Path
    parameters: dict[str, Any]
    notebook_sha256: str
    parameters_sha256: str
    source_sha256: str
    versions: dict[str, str]
    commit: str | None = None
    seed: int | None = None
    host: str | None = None
    device: str | None = None
    status: str = "planned"
    started: str | None = None
    finished: str | None = None
    seconds: float | None = None
    error: dict[str, Any] | None = None
    finding: str | None = None
    outputs: dict[str, str] = field(default_factory=dict)
    reused: bool = False

    @property
    def stem(self) -> str:
        """The notebook's name without folder and suffix."""
        return Path(self.notebook).stem

    @property
    def key(self) -> str:
        """Hash of everything that decides the result."""
        return text_hash(json.dumps([self.asked, self.source_sha256, self.versions], sort_keys=True))

    @property
    def asked(self) -> tuple[str, str]:
        """What was asked, whichever code answered: the hashes of the notebook and of its parameters."""
        return self.notebook_sha256, self.parameters_sha256

    @property
    def whole(self) -> bool:
        """Every file that the run left is still there and unchanged."""
        files = {self.folder / name: digest for name, digest in self.outputs.items()}
        return all(path.is_file() and file_hash(path) == digest for path, digest in files.items())

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


def parameters_hash(parameters: Mapping[str, Any]) -> str:
    """Hash parameters; ``out_dir`` decides nothing and is left out."""
    decisive = {name: value for name, value in parameters.items() if name != "out_dir"}
    return text_hash(json.dumps(decisive, sort_keys=True))


def notebook_hash(notebook: str | os.PathLike) -> str:
    """Hash the cells of a notebook: kinds, sources and tags, not outputs or other metadata."""
    cells = nbformat.read(notebook, as_version=4).cells
    parts = [[cell.cell_type, cell.source, sorted(cell.metadata.get("tags", []))] for cell in cells]
    return text_hash(json.dumps(parts))


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


@cache
def commit() -> str | None:
    """Return the commit that the package's files are of, with a "+" if they differ from it; None outside a clone."""
    package = Path(__file__).parent

    def git(*arguments: str) -> str:
        call = ["git", "-C", str(package), *arguments]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # an environment may lie inside somebody else's repository
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):  # no git, or no clone
        return None


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_hash(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
