"""Parameters: what a notebook's parameters cell declares, and which values a profile gives it.

papermill accepts any name and any type and only logs a warning; here both are errors, before a kernel starts.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import nbformat
import papermill
import yaml

from epiviz.choices import nearest

NAMES = (
    "model",
    "trace",
    "policy",
    "others",
    "budget",
    "seed",
    "n_problems",
    "max_new_tokens",
    "sweep",
    "protocol",
    "data",
    "out_dir",
    "profile",
)


class ParameterError(ValueError):
    """A parameter that a notebook does not have, or a value that does not fit it."""


def declared(notebook: str | os.PathLike) -> dict[str, dict[str, str]]:
    """Return per parameter what papermill reads: its ``inferred_type_name``, ``default`` and ``help``, all text."""
    if not Path(notebook).is_file():
        raise FileNotFoundError(f"there is no notebook {str(notebook)!r}")
    content = nbformat.read(notebook, as_version=4)
    # papermill asks the metadata for the language, which stripping tools remove
    content.metadata.kernelspec = {"name": "python3", "language": "python", "display_name": "Python 3"}
    return papermill.inspect_notebook(content)


def check_parameters(notebook: str | os.PathLike, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values converted to the types that the notebook's parameters cell declares.

    Parameters
    ----------
    notebook : str or path
        Its parameters cell annotates every name with int, float, str, bool, list, list[…] or dict.
    parameters : mapping
        Values as Python objects, or as text (from a command line): "128" for an int, "true" for a bool, "a,b" for a
        list.

    Raises
    ------
    ParameterError
        A name that the notebook does not have, or a value that does not fit its type.
    """
    known = declared(notebook)
    name_of_notebook = Path(notebook).name
    checked = {}
    for name, value in parameters.items():
        if name not in known:
            raise ParameterError(f"{name_of_notebook} has no parameter {name!r}; {nearest(name, known)}")
        kind, meaning = known[name]["inferred_type_name"], known[name]["help"]
        told = f" ({meaning})" if meaning else ""
        checked[name] = convert(f"{name_of_notebook}: parameter {name!r}{told}", kind, value)
    return checked


def convert(what: str, kind: str, value: Any) -> Any:
    """Return a value as the annotated type, or raise :class:`ParameterError` that says what must be of that type."""
    try:
        return _converter(kind)(value)
    except (TypeError, ValueError) as error:
        raise ParameterError(f"{what} must be {kind}, got {value!r} ({type(value).__name__})") from error


def defaults(notebook: str | os.PathLike) -> dict[str, Any]:
    """Return the values that the notebook's parameters cell assigns.

    Raises
    ------
    ParameterError
        A value is no literal: papermill would not recompute it from injected parameters.
    """
    found = {}
    for name, parameter in declared(notebook).items():
        try:
            found[name] = ast.literal_eval(parameter["default"])
        except (ValueError, SyntaxError) as error:
            raise ParameterError(
                f"{Path(notebook).name}: parameter {name!r} = {parameter['default']} is no literal; derived values "
                "belong in a later cell"
            ) from error
    return found


def profile_parameters(notebook: str | os.PathLike, profile: str) -> dict[str, Any]:
    """Return the parameters that a profile gives a notebook.

    A profile, ``profiles/<name>.yaml`` beside the notebooks, has a block ``default`` and may have one for a notebook's
    stem. Of ``default`` a notebook gets the names it has; of its own block every name must be one of its parameters.

    Raises
    ------
    FileNotFoundError
        There is no such profile.
    ParameterError
        A block, a name or a value in it is wrong.
    """
    notebook = Path(notebook)
    blocks = _read_profile(notebook.parent / "profiles", profile)
    stems = {path.stem for path in notebook.parent.glob("*.ipynb")}
    for stem in blocks:
        if stem not in {"default", *stems}:
            raise ParameterError(f"profile {profile!r} has a block {stem!r} for no notebook; {nearest(stem, stems)}")
    shared = blocks.get("default", {})
    for name in shared:
        if name not in NAMES:
            raise ParameterError(f"profile {profile!r} gives every notebook {name!r}; {nearest(name, NAMES)}")
    known = declared(notebook)
    fitting = {name: value for name, value in shared.items() if name in known}
    return check_parameters(notebook, fitting | blocks.get(notebook.stem, {}))


def parse_settings(texts: Iterable[str]) -> dict[str, str]:
    """Read ``key=value`` texts of a command line.

    Examples
    --------
    >>> parse_settings(["budget=256", "others=epikv,random"])
    {'budget': '256', 'others': 'epikv,random'}
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ParameterError(f"{text!r} is no setting; write key=value")
        if name.strip() in found:
            raise ParameterError(f"{name.strip()!r} is given twice")
        found[name.strip()] = value.strip()
    return found


def parse_grid(texts: Iterable[str]) -> dict[str, list[str]]:
    """Read the axes of a grid: ``key=value,value``, or ``key=0..3`` for the whole numbers from 0 to 3.

    Values that contain commas are separated by semicolons.

    Examples
    --------
    >>> parse_grid(["policy=epikv,full", "seed=0..2", "others=epikv,random;full"])
    {'policy': ['epikv', 'full'], 'seed': ['0', '1', '2'], 'others': ['epikv,random', 'full']}
    """
    return {name: _values(name, text) for name, text in parse_settings(texts).items()}


def _values(name: str, text: str) -> list[str]:
    if ends := re.fullmatch(r"(-?\d+)\.\.(-?\d+)", text):
        first, last = map(int, ends.groups())
        if last < first:
            raise ParameterError(f"{name}={text}: a range goes upwards; write {last}..{first}")
        return [str(number) for number in range(first, last + 1)]
    values = [value.strip() for value in text.split(";" if ";" in text else ",")]
    if "" in values:
        raise ParameterError(f"{name}={text}: one of its values is empty")
    return values


def at_least_one(options: object, *names: str) -> None:
    """Raise :class:`ParameterError` if one of these attributes is a number below 1; None is fine."""
    for name in names:
        if (value := getattr(options, name)) is not None and value < 1:
            raise ParameterError(f"{name} must be at least 1, got {value}")


def _read_profile(folder: Path, profile: str) -> dict[str, dict[str, Any]]:
    path = folder / f"{profile}.yaml"
    if not path.is_file():
        known = [each.stem for each in folder.glob("*.yaml")]
        raise FileNotFoundError(f"there is no profile {profile!r} in {str(folder)!r}; {nearest(profile, known)}")
    blocks = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(blocks, dict) or not all(isinstance(block, dict) for block in blocks.values()):
        raise ParameterError(f"{path.name}: a profile maps 'default' and notebook stems to parameters")
    return blocks


def _converter(kind: str) -> Callable[[Any], Any]:
    """Return the function that makes a value of the annotated type or raises."""
    kind = kind.lower().replace(" ", "").removesuffix("|none")
    if kind.startswith("list[") and kind.endswith("]"):
        item = _converter(kind[len("list[") : -1])
        return lambda value: [item(each) for each in _to_list(value)]
    if kind not in _CONVERTERS:
        raise ValueError(f"annotation {kind!r} is not one of {', '.join(_CONVERTERS)} or list[…]")
    return _CONVERTERS[kind]


def _to_int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("a bool is no int")
    return int(value) if isinstance(value, str) else operator.index(value)


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, Real)):
        raise TypeError("not a number")
    return float(value)


def _to_bool(value: Any) -> bool:
    words = {"true": True, "false": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise TypeError("neither true nor false")


def _to_list(value: Any) -> list:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(_instance(value, (list, tuple)))


def _instance(value: Any, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(value, kind):
        raise TypeError("wrong type")
    return value


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "int": _to_int,
    "float": _to_float,
    "bool": _to_bool,
    "str": lambda value: _instance(value, str),
    "list": _to_list,
    "dict": lambda value: _instance(value, dict),
}
