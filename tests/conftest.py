"""Settings and fixtures of all tests."""

from __future__ import annotations

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
if "PYTEST_XDIST_WORKER" in os.environ:  # workers that all start a thread per core only wait for each other
    threads = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # before torch is imported, and for kernels started by tests

import json
import signal
from datetime import date
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import settings
from synthetic import make_trace

import epiviz as ev
from epiviz.manifest import versions
from epiviz.text import join_bytes

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # jobs in the background ignore Ctrl-C; some tests press it
    signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore = ["fixtures"]  # scripts that need packages of their own

# The same few examples each time; `--hypothesis-profile=full` draws many, and other ones each time.
settings.register_profile("few", derandomize=True, max_examples=12, deadline=None)
settings.register_profile("full", max_examples=300, deadline=None)
settings.load_profile("few")


@pytest.fixture(scope="session")
def smollm2():
    """The bundled model: fetched and converted once into the cache directory."""
    return ev.load("smollm2-135m")


@pytest.fixture(scope="session")
def local_model(tmp_path_factory) -> Path:
    """The folder of a random model with the word pieces of no language, as a group would download a real one."""
    from tiny import byte_level
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None)
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    byte_level(sorted(ByteLevel.alphabet()), chat_template=template).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def synthetic_trace() -> ev.Trace:
    """A made-up trace of 20 prompt and 100 further tokens, 5 layers and 2 KV heads."""
    spans = join_bytes([f"t{index} ".encode() for index in range(120)])
    header = {"model": "made-up", "tokenizer": "none", "source": "tokens", "status": "finished", "seed": 0}
    return ev.Trace(**vars(make_trace(layers=5, spans=spans, seed=3)), header=header)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run every cell of the matrix and write down the result")
    parser.addoption("--policy", action="append", default=[], help="a file with a policy that the matrix has to hold")


def pytest_configure(config):
    for file in config.getoption("policy"):
        ev.policies.get(file)


def pytest_terminal_summary(terminalreporter, config):
    """Write the whole matrix down once it ran: what each cell measured, and the cells that failed."""
    if not config.getoption("full") or hasattr(config, "workerinput"):
        return
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    cells = [
        dict(report.user_properties)["cell"] | {"outcome": report.outcome, "seconds": round(report.duration, 2)}
        for report in reports
        if report.when == "call" and "cell" in dict(report.user_properties)
    ]
    if cells:
        path = Path(__file__).parents[1] / "data" / "results" / "matrix.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(cells).to_csv(path, index=False, float_format="%.3g")
        told = {"date": date.today().isoformat(), "cells": len(cells), "versions": versions()}
        path.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
        terminalreporter.write_line(f"{len(cells)} cells written to {path}")
