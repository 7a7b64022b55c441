"""The command line: ``epiviz study``, ``epiviz bench`` …"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from epiviz import runs
from epiviz.parameters import ParameterError, parse_grid, parse_settings, profile_parameters
from epiviz.results import write_text_atomically

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


@app.callback()
def main() -> None:
    """See which key-value pairs a reasoning model can lose, and what it writes once they are gone."""


@app.command()
def study(
    notebooks: Annotated[list[str] | None, typer.Argument(help="Paths or stems; all notebooks by default.")] = None,
    profile: Annotated[str, typer.Option(help="A file in notebooks/profiles/: smoke, demo, full or paper.")] = "demo",
    out: Annotated[Path, typer.Option(help="One folder per notebook is made here.")] = Path("runs/study"),
    force: Annotated[bool, typer.Option("--force", help="Run again what is finished and unchanged.")] = False,
) -> None:
    """Run notebooks with a profile's parameters and print what they found."""
    with _told("study"):
        done = runs.study(notebooks or (), profile=profile, out=out, force=force)
    typer.echo(f"\n{runs.summary(done)}")
    if any(run.status != "done" for run in done):
        raise typer.Exit(1)


_SETTINGS = typer.Option("--parameter", "-p", help="key=value, may be repeated; goes before the profile.")
_PROFILE = typer.Option(help="A file in profiles/ beside the notebook; without, what the notebook says itself.")


@app.command()
def run(
    notebook: Annotated[str, typer.Argument(help="Path or stem.")],
    parameter: Annotated[list[str] | None, _SETTINGS] = None,
    profile: Annotated[str | None, _PROFILE] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; by default runs/<stem>.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Run again what is finished and unchanged.")] = False,
    cell_timeout: Annotated[int | None, typer.Option(help="Seconds that one cell may take.")] = None,
) -> None:
    """Run one notebook with parameters."""
    with _told("run"):
        (path,) = runs.find_notebooks([notebook])
        given = profile_parameters(path, profile) if profile else {}
        given |= parse_settings(parameter or ())
        done = runs.execute(path, given, out or Path("runs") / path.stem, force=force, cell_timeout=cell_timeout)
    typer.echo(runs.summary([done]))
    if done.status != "done":
        raise typer.Exit(1)


@app.command()
def sweep(
    notebooks: Annotated[list[str], typer.Argument(help="Paths or stems.")],
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", "-g", help="key=a,b or key=0..3, may be repeated: every combination is a run."),
    ] = None,
    parameter: Annotated[list[str] | None, _SETTINGS] = None,
    profile: Annotated[str | None, _PROFILE] = None,
    out: Annotated[Path, typer.Option(help="The sweep's folder; the same command goes on in it.")] = Path("runs/sweep"),
    executor: Annotated[str, typer.Option(help="Where runs are made: local, ray or slurm.")] = "local",
    workers: Annotated[
        int | None, typer.Option(help="Runs at a time; by default one per core, GPU or place in a cluster.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="key=value for the executor, as gpus=1; may be repeated.")
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try failed runs again.")] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Let finished runs of another version of the code stand.")
    ] = False,
    cell_timeout: Annotated[int | None, typer.Option(help="Seconds that one cell may take.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and an estimate, start nothing.")] = False,
) -> None:
    """Run notebooks over a grid of parameters, in a folder that can be continued, shared and collected."""
    from epiviz import executors, sweeps

    with _told("sweep"):
        options = parse_settings(option or ()) | ({"workers": str(workers)} if workers is not None else {})
        maker = executors.get(executor, options)
        asked = sweeps.plan_sweep(
            notebooks, parse_grid(grid or ()), out=out, profile=profile, settings=parse_settings(parameter or ())
        )
        if dry_run:
            jobs = sweeps.plan_jobs(asked, retry_failed=retry_failed, keep=keep)
            typer.echo("\n".join(map(str, asked.cells.values())))
            typer.echo(sweeps.overview(asked, jobs, sweeps.standing(jobs), maker.width()))
            return
        try:
            made = sweeps.run_sweep(asked, maker, retry_failed=retry_failed, keep=keep, cell_timeout=cell_timeout)
        except KeyboardInterrupt:
            typer.echo("\nepiviz sweep: interrupted; the same command goes on", err=True)
            raise typer.Exit(130) from None
    typer.echo(f"\n{sweeps.summary(asked, made)}")
    if any(run.status != "done" for run in made):
        raise typer.Exit(1)


@app.command()
def doctor() -> None:
    """Tell what this machine has, what really runs on it, and what a missing piece means."""
    from epiviz.doctor import BAD, examine

    bad = False
    for finding in examine():
        typer.echo(finding)
        bad |= finding.state == BAD
    if bad:
        raise typer.Exit(1)


def _write_json(path: Path, found: dict) -> None:
    write_text_atomically(path, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    typer.echo(f"written to {path}")


@contextmanager
def _told(command: str, *more: type[Exception]) -> Iterator[None]:
    """Print what a user can put right in one line, and exit with 2."""
    try:
        yield
    except (ParameterError, OSError, *more) as error:
        typer.echo(f"epiviz {command}: {error}", err=True)
        raise typer.Exit(2) from error


bench_app = typer.Typer(no_args_is_help=True, help="Measure speed as ratios in one run, and write them down as JSON.")
app.add_typer(bench_app, name="bench")


@bench_app.command("replay")
def bench_replay(
    model: Annotated[str, typer.Option(help="Bundled, hub id or folder.")] = "smollm2-135m",
    trace: Annotated[Path | None, typer.Option(help="A trace file; without, the model writes --tokens tokens.")] = None,
    tokens: Annotated[int, typer.Option(help="Length of the trace, prompt included.")] = 1500,
    budget: Annotated[int, typer.Option(help="Slots per layer and KV head right after an eviction.")] = 256,
    buffer: Annotated[int, typer.Option(help="Slots that may pile up between two evictions.")] = 64,
    policy: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    out: Annotated[Path, typer.Option(help="The JSON file.")] = Path("data/results/bench_replay.json"),
) -> None:
    """Replay against stepping through the same trace: seconds, ratio, and where rounding decides."""
    import epiviz as ev
    from epiviz import bench, models

    bad = ev.BudgetError, ev.UnknownPolicyError, ev.TraceFileError, ev.ForeignTraceError, models.UnsupportedModelError
    with _told("bench replay", *bad):
        lm = ev.load(model)
        text = ev.Trace.load(trace) if trace else bench.long_trace(lm, tokens)
        names = policy or ["epikv", "vase-attnv"]
        found = bench.bench_replay(lm, text, names, ev.Budget(budget, buffer=buffer), typer.echo)
    _write_json(out, found)


@bench_app.command("views")
def bench_views(
    tokens: Annotated[int, typer.Option(help="Length of the trace on screen.")] = 32_768,
    runs: Annotated[int, typer.Option(help="The quickest counts, all are written down.")] = 3,
    out: Annotated[Path, typer.Option(help="The JSON file.")] = Path("data/results/bench_views.json"),
) -> None:
    """The views in a headless browser: from a slider's move to the frame, build, redraw, and the size of a page."""
    from epiviz import bench

    with _told("bench views", bench.BrowserMissingError):
        found = bench.bench_views(tokens, runs, typer.echo)
    typer.echo(f"\n{bench.table(found)}\n")
    _write_json(out, found)


calibrate_app = typer.Typer(no_args_is_help=True, help="Find what a method needs to know about a model beforehand.")
app.add_typer(calibrate_app, name="calibrate")


@calibrate_app.command("thinkv")
def calibrate_thinkv(
    traces: Annotated[list[Path], typer.Argument(help="Trace files, of texts that the model wrote or reads.")],
    model: Annotated[str, typer.Option(help="Bundled, hub id or folder.")] = "smollm2-135m",
    out: Annotated[
        Path | None,
        typer.Option(help="A file of thresholds; without, the one in the cache directory, which goes before ours."),
    ] = None,
) -> None:
    """Find the attention sparsities that tell ThinKV's kinds of thoughts apart on a model."""
    import epiviz as ev
    from epiviz import calibration, models
    from epiviz.policies import thinkv

    bad = calibration.CalibrationError, ev.TraceFileError, ev.ForeignTraceError, models.UnsupportedModelError
    with _told("calibrate thinkv", *bad):
        found = calibration.calibrate(ev.load(model), [ev.Trace.load(path) for path in traces])
    out = out or models.cache_directory() / thinkv.FILE
    found.save(out, command=f"epiviz calibrate thinkv {' '.join(map(str, traces))} --model {model}")
    typer.echo(f"{found}\nwritten to {out}")
