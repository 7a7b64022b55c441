"""The same sweep gives the same table wherever its runs are made."""

import pandas as pd
import pytest
from test_runs import write_notebook

from epiviz import sweeps
from epiviz.collected import collect
from epiviz.executors import get
from epiviz.parameters import ParameterError, parse_grid

PARAMETERS = """\
policy: str = "full"  # what is kept
budget: int = 128  # slots per layer and KV head
seed: int = 0  # of the draws
out_dir: str = "nowhere"  # results go here
"""
RECORD = """\
import pandas as pd
from epiviz.results import save_results
losses = [len(policy) / budget + seed, {}]
save_results(pd.DataFrame({{"item": [0, 1], "nll": losses}}), out_dir, f"{{policy}} at {{budget}}.")
"""
BOTH = ["01_one", "02_two"]
GRID = ["policy=full,random,epikv", "budget=64,128", "seed=0..1"]
FEW = ["policy=full,random", "budget=64", "seed=1"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path)
    for number, stem in enumerate(BOTH):
        write_notebook(tmp_path / "notebooks" / f"{stem}.ipynb", RECORD.format(number), parameters=PARAMETERS)
    return tmp_path


def table(name, executor, notebooks, grid):
    sweep = sweeps.plan_sweep(notebooks, parse_grid(grid), out=f"runs/{name}")
    made = sweeps.run_sweep(sweep, executor, say=lambda _: None)
    assert [run.status for run in made] == ["done"] * len(sweep.cells), [run.error for run in made if run.error]
    assert all(run.whole and {"executed.ipynb", "executed.html", "results.parquet"} <= set(run.outputs) for run in made)
    return collect(f"runs/{name}")


@pytest.fixture
def cluster():
    """A Ray cluster of two nodes, each with one core."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    cluster.add_node(**node)
    yield cluster
    cluster.shutdown()


@pytest.mark.timeout(900)
def test_local_processes_ray_nodes_and_slurm_jobs_give_the_same_table(project, cluster, request):
    """Two notebooks over a grid, with ``--full`` three policies, two budgets and two seeds.

    submitit's local executor stands in for a Slurm.
    """
    pytest.importorskip("submitit")
    notebooks, grid, runs = (BOTH, GRID, 24) if request.config.getoption("full") else (BOTH[:1], FEW, 2)
    ours = table("local", get("local", {"workers": "2"}), notebooks, grid)
    assert len(ours) == 2 * runs
    assert list(ours.columns) == ["run", "notebook", "policy", "budget", "seed", "item", "nll"]
    first = ours[(ours["policy"] == "random") & (ours["budget"] == 64) & (ours["seed"] == 1) & (ours["item"] == 0)]
    assert first["nll"].tolist() == [6 / 64 + 1] * len(notebooks)

    nodes = table("ray", get("ray", {"address": cluster.address}), notebooks, grid)
    jobs = table("slurm", get("slurm", {"cluster": "local", "runs_per_job": "12"}), notebooks, grid)
    pd.testing.assert_frame_equal(nodes, ours)
    pd.testing.assert_frame_equal(jobs, ours)


def test_slurm_that_is_not_there_is_said(project, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", "")
    sweep = sweeps.plan_sweep(["01_one"], {}, out="runs/x")
    with pytest.raises(ParameterError, match="there is no Slurm here"):
        sweeps.run_sweep(sweep, get("slurm"), say=lambda _: None)
