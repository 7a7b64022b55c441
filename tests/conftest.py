"""Settings and fixtures of all tests."""

from __future__ import annotations

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest

import epiviz as ev


@pytest.fixture(scope="session")
def smollm2():
    """The bundled model: fetched and converted once into the cache directory."""
    return ev.load("smollm2-135m")
