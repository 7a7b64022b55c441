"""Every policy in every cell of the table: equal to the oracle, within its budget, independent of its batch."""

from __future__ import annotations

from dataclasses import asdict

import matrix


def pytest_generate_tests(metafunc):
    cells = matrix.FULL if metafunc.config.getoption("full") else matrix.CI
    metafunc.parametrize("cell", cells, ids=str)


def test_cell(cell, record_property):
    told = asdict(cell) | {"dtype": str(cell.dtype).removeprefix("torch.")}
    del told["rows"], told["orders"]
    record_property("cell", told | matrix.check(cell))
