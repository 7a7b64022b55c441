"""The papers' numbers: the tables' form, and cells looked up by hand in the papers' own tables."""

from __future__ import annotations

import pytest

import epiviz as ev
from epiviz import policies, tasks
from epiviz.papers import COLUMNS

FRAME = ev.published()


def cell(task, method, budget=None, unit="%", table=None, model=None):
    rows = FRAME[(FRAME["task"] == task) & (FRAME["method"] == method) & (FRAME["unit"] == unit)]
    rows = rows[rows["budget"].isna() if budget is None else rows["budget"] == budget]
    rows = rows if table is None else rows[rows["table"] == table]
    rows = rows if model is None else rows[rows["model"] == model]
    (value,) = rows["value"]
    return value


def test_schema():
    assert list(FRAME.columns) == [*COLUMNS, "file", "withdrawn"]
    assert FRAME["value"].dtype == "float64" and FRAME["budget"].dtype == "Int64"
    texts = FRAME[["unit", "model", "task", "method", "paper", "table"]]
    assert texts.ne("").all(axis=None) and FRAME["value"].notna().all()
    assert set(FRAME["paper"]) == {"epikv", "vase"}
    assert set(FRAME["model"]) == {
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        "Qwen/Qwen3-4B",
        "Qwen/Qwen3-14B",
    }
    assert not FRAME.duplicated(["unit", "model", "task", "budget", "method", "paper", "table"]).any()


def test_values_lie_where_their_units_allow():
    limits = {
        "%": (0, 100),
        "Spearman's rho": (-1, 1),
        "share of windows flipped": (0, 1),
        "s per problem": (30, 2000),
        "MB peak": (15_000, 20_000),
        "GB peak": (40, 80),
        "GiB peak": (30, 80),
        "tokens per s": (100, 500),
        "tokens written": (1000, 32768),
        "texts without an answer": (0, 500),
    }
    assert set(FRAME["unit"]) == set(limits)
    for unit, part in FRAME.groupby("unit"):
        low, high = limits[unit]
        assert part["value"].between(low, high).all(), unit
    assert set(FRAME["budget"].dropna()) == {512, 1024, 2048, 4096, 6144, 8192}


def test_names_are_those_used_here():
    accuracy = FRAME[FRAME["file"].isin(["epikv_accuracy", "vase_accuracy"])]
    unknown = set(accuracy["method"]) - set(policies.names())
    assert unknown == {"seerattention-r"}, "trained gates, which are not part of this project"
    known = set(tasks.names())
    assert {task for task in accuracy["task"] if not task.startswith("mean of")} <= known


def test_budgets_are_missing_exactly_for_the_full_cache():
    accuracy = FRAME[FRAME["file"].isin(["epikv_accuracy", "vase_accuracy"])]
    accuracy = accuracy[~accuracy["task"].str.startswith("mean of")]
    assert (accuracy["budget"].isna() == (accuracy["method"] == "full")).all()


def test_epikv_cells():
    assert cell("math500", "full", table="Table 3") == 75
    assert cell("aime24", "full", table="Table 4") == 43.3
    assert [cell("math500", "epikv", budget) for budget in (512, 1024, 2048, 4096)] == [0, 27, 49, 72]
    assert cell("aime24", "epikv-lag", 8192) == 36.7 and cell("aime24", "key-variance", 8192) == 23.3
    assert cell("aime24", "segment-hs", 2048) == 3.3
    assert cell("math500", "epikv-seg", 1024) == 34
    assert cell("aime24", "epikv-lag", 512, "s per problem") == 1014
    assert cell("aime24", "epikv", 4096, "MB peak") == 16791
    assert cell("math500", "raas", 512, "s per problem") == 873


def test_the_withdrawn_row_is_marked():
    withdrawn = FRAME[FRAME["withdrawn"] & (FRAME["unit"] == "%")]
    assert set(withdrawn["method"]) == {"h2o"} and set(withdrawn["task"]) == {"math500"}
    assert withdrawn.sort_values("budget")["value"].tolist() == [1, 5, 49, 67]
    rerun = FRAME[(FRAME["table"] == "rerun after version 1") & (FRAME["method"] == "h2o")]
    assert rerun.sort_values("budget")["value"].tolist() == [0, 22, 46, 64]
    assert not ev.published(withdrawn=False)["withdrawn"].any()
    assert len(ev.published(withdrawn=False)) == len(FRAME) - FRAME["withdrawn"].sum()


def test_epikv_correlations():
    def rho(task, layer, table="signal ablation"):
        return cell(task, f"displacement of layer {layer}, mean of 64", unit="Spearman's rho", table=table)

    assert rho("math500", 10) == 0.112 and rho("math500 (eager)", 21) == -0.109
    assert (rho("aime24", 21), rho("aime24", 21, "signal ablation, April 6")) == (-0.011, -0.085)
    displacement = FRAME[FRAME["method"].str.fullmatch(r"displacement of layer \d+, mean of 64")]
    assert len(displacement) == 32 * 10


def test_vase_cells():
    four, fourteen = "Qwen/Qwen3-4B", "Qwen/Qwen3-14B"
    assert cell("aime25", "vase-attnv", 4096, table="all_Qwen3-4B.json") == 59.17
    assert cell("livecodebench", "rkv-simple", 2048, table="all_Qwen3-4B.json") == 62.60
    assert cell("math500", "full", table="all_Qwen3-14B.json") == 95.22
    assert cell("hmmt25", "vase-dkv", 6144, table="budget sweep", model=fourteen) == 51.04
    assert cell("gsm8k", "evict-largest", 512) == 14.3 and cell("gsm8k", "random", 512, model=four) == 53.2
    long = "256 tokens, then 16384 more, batch 16"
    assert cell(long, "vase-dkv", 2048, "tokens per s") == 410.9
    assert cell(long, "full", unit="GiB peak") == 68.7
    assert cell("gpqa-diamond", "snapkv", 2048, "tokens written") == 20403


def test_means_are_those_of_five_tasks():
    for model, table in (("Qwen/Qwen3-4B", "all_Qwen3-4B.json"), ("Qwen/Qwen3-14B", "all_Qwen3-14B.json")):
        part = FRAME[(FRAME["table"] == table) & (FRAME["model"] == model) & (FRAME["task"] != "livecodebench")]
        is_mean = part["task"].str.startswith("mean of")
        means = part[is_mean].set_index("method")["value"]
        assert (part[~is_mean].groupby("method")["value"].mean() - means).abs().max() < 0.006


def test_bad_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there are no tables in .*data/published/ of a source checkout"):
        ev.published(folder=tmp_path)
    (tmp_path / "a.csv").write_text("value,unit\n1,%\n")
    with pytest.raises(ValueError, match=r"a\.csv must have the columns value, unit, model.*it has value, unit"):
        ev.published(folder=tmp_path)
    line = "1,%,m,t,512,epikv,epikv,Table 1,\n"
    (tmp_path / "a.csv").write_text(",".join(COLUMNS) + "\n" + line + line.replace("1,%", "2,%"))
    with pytest.raises(ValueError, match="the same number stands twice: %, m, t, 512, epikv, epikv, Table 1"):
        ev.published(folder=tmp_path)
