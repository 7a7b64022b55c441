"""Benchmarks: ratios and times measured in one run on one machine, with what they were measured on."""

from epiviz.bench.example import long_example
from epiviz.bench.machine import environment, machine
from epiviz.bench.replay import bench_replay, compare_decisions, long_trace, step
from epiviz.bench.views import BrowserMissingError, bench_views, table

__all__ = [
    "BrowserMissingError",
    "bench_replay",
    "bench_views",
    "compare_decisions",
    "environment",
    "long_example",
    "long_trace",
    "machine",
    "step",
    "table",
]
