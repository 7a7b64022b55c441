"""Failures: what a manifest says about a run that did not end well."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path
from typing import Any

from nbconvert.filters import strip_ansi
from papermill.exceptions import PapermillExecutionError

from epiviz.results import write_text_atomically

TRACEBACK = "traceback.txt"

_FREE = "free space there, or choose another folder"
_CHOOSE = "choose a folder that can be written to"
_REMEDIES = {
    errno.ENOSPC: _FREE,
    errno.EDQUOT: _FREE,
    errno.EFBIG: "files may not grow that large here (`ulimit -f`); raise the limit, or choose another folder",
    errno.EROFS: _CHOOSE,
    errno.EACCES: _CHOOSE,
    errno.EPERM: _CHOOSE,
    errno.ENOTDIR: f"a part of its path is a file; {_CHOOSE}",
    errno.EEXIST: f"it is a file; {_CHOOSE}",
}


def cell_error(failure: PapermillExecutionError, folder: Path) -> dict[str, Any]:
    """Describe an exception that a cell raised, and write its traceback into the folder."""
    text = strip_ansi("\n".join(failure.traceback))
    return _record(failure.ename, strip_ansi(failure.evalue), failure.exec_count, text, folder)


def other_error(failure: Exception, folder: Path) -> dict[str, Any]:
    """Describe the exception being handled that is no cell's: a dead kernel, a time limit, a full disk."""
    message = cannot_write(failure, folder) if isinstance(failure, OSError) else strip_ansi(str(failure))
    return _record(type(failure).__name__, message, None, traceback.format_exc(), folder)


def without_traceback(kind: str, message: str) -> dict[str, Any]:
    """Describe what ended a run from outside, where there is no traceback to keep."""
    return {"type": kind, "message": message, "cell": None, "traceback": None}


def cannot_write(error: OSError, folder: str | Path) -> str:
    """Say what an error of the file system means for a folder, and what helps."""
    remedy = _REMEDIES.get(error.errno)
    return f"cannot write into {str(folder)!r}: {error.strerror}; {remedy}" if remedy else str(error)


def _record(kind: str, message: str, cell: int | None, text: str, folder: Path) -> dict[str, Any]:
    write_text_atomically(folder / TRACEBACK, text.rstrip() + "\n")
    return {"type": kind, "message": message.strip(), "cell": cell, "traceback": TRACEBACK}
