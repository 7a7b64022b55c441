import numpy as np
import pandas as pd
import pytest

from epiviz.collected import MixedVersionsError, collect
from epiviz.manifest import Manifest
from epiviz.results import read_finding, save_results


@pytest.fixture
def frame():
    return pd.DataFrame({"policy": ["epikv", "random"], "mean_slots": [96.5, 97.0]})


def test_a_table_and_its_finding_are_recorded(frame, tmp_path):
    table = save_results(frame, tmp_path / "new" / "folder", "  Both keep 97 slots.  ")
    assert table.name == "results.parquet"
    pd.testing.assert_frame_equal(pd.read_parquet(table), frame)
    assert read_finding(table.parent) == "Both keep 97 slots."
    assert sorted(path.name for path in table.parent.iterdir()) == ["finding.json", "results.parquet"]


def test_a_finding_is_optional_and_the_name_free(frame, tmp_path):
    assert save_results(frame, tmp_path, name="meter").name == "meter.parquet"
    assert read_finding(tmp_path) is None
    assert len(collect(tmp_path, name="meter")) == 2


def test_named_index_levels_become_columns_and_unnamed_ones_go(frame, tmp_path):
    means = frame.groupby("policy").mean()
    assert list(pd.read_parquet(save_results(means, tmp_path)).columns) == ["policy", "mean_slots"]
    assert list(pd.read_parquet(save_results(frame[1:], tmp_path)).columns) == ["policy", "mean_slots"]


@pytest.mark.parametrize(
    ("frame", "error", "message"),
    [
        ({"a": [1]}, TypeError, "not dict"),
        (pd.DataFrame({"a": []}), ValueError, "0 rows and 1 columns"),
        (pd.DataFrame({3: [1]}), ValueError, r"rename \[3\]"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), ValueError, "twice"),
        (pd.DataFrame({"run": [1]}), ValueError, "rename yours"),
    ],
)
def test_a_frame_that_cannot_be_recorded_is_refused(frame, error, message, tmp_path):
    with pytest.raises(error, match=message):
        save_results(frame, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("finding", "error"), [("", ValueError), ("two\nlines", ValueError), (3, TypeError)])
def test_a_finding_is_one_sentence(finding, error, frame, tmp_path):
    with pytest.raises(error):
        save_results(frame, tmp_path, finding)


def test_a_failed_write_keeps_the_earlier_table(frame, tmp_path):
    save_results(frame, tmp_path)
    with pytest.raises(Exception, match="Conversion failed"):
        save_results(pd.DataFrame({"mixed": [1, np.zeros(2)]}), tmp_path)
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "results.parquet"), frame)
    assert [path.name for path in tmp_path.iterdir()] == ["results.parquet"]


def test_collect_names_runs_and_joins_different_columns(frame, tmp_path):
    save_results(frame, tmp_path / "06")
    save_results(pd.DataFrame({"layer": [3]}), tmp_path / "sweep" / "04")
    found = collect(tmp_path)
    assert list(found.columns) == ["run", "policy", "mean_slots", "layer"]
    assert found["run"].tolist() == ["06", "06", "sweep/04"]
    assert collect(tmp_path / "06")["run"].tolist() == ["06", "06"]


def save_manifest(folder, status="done", source="a" * 64):
    hashes = {"notebook_sha256": "n", "parameters_sha256": "p", "source_sha256": source}
    Manifest("01_tiny.ipynb", folder, {}, versions={}, status=status, **hashes).save()


def test_collect_leaves_out_unfinished_runs_aloud(frame, tmp_path):
    for name, status in (("good", "done"), ("bad", "failed")):
        save_results(frame, tmp_path / name)
        save_manifest(tmp_path / name, status)
    with pytest.warns(UserWarning, match="left out 1 of 2 runs that did not finish: bad"):
        assert set(collect(tmp_path)["run"]) == {"good"}


def test_collect_does_not_mix_versions_unless_told(frame, tmp_path):
    for name, source in (("old", "a" * 64), ("new", "b" * 64)):
        save_results(frame, tmp_path / name)
        save_manifest(tmp_path / name, source=source)
    with pytest.raises(MixedVersionsError, match="made by 2 versions of the code: 1 of no commit .* mix_versions=True"):
        collect(tmp_path)
    assert set(collect(tmp_path, mix_versions=True)["run"]) == {"old", "new"}


def test_collect_says_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="save_results"):
        collect(tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder"):
        collect(tmp_path / "none")
