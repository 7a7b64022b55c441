"""The command line: ``epiviz study``, ``epiviz bench`` …"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from epiviz import runs
from epiviz.parameters import ParameterError
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
    try:
        done = runs.study(notebooks or (), profile=profile, out=out, force=force)
    except (ParameterError, FileNotFoundError, FileExistsError) as error:
        typer.echo(f"epiviz study: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"\n{runs.summary(done)}")
    if any(run.status != "done" for run in done):
        raise typer.Exit(1)


bench = typer.Typer(no_args_is_help=True, help="Measure speed as ratios in one run, and write them down as JSON.")
app.add_typer(bench, name="bench")


@bench.command("replay")
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
    from epiviz import bench

    lm = ev.load(model)
    text = ev.Trace.load(trace) if trace else bench.long_trace(lm, tokens)
    names = policy or ["epikv", "vase-attnv"]
    found = bench.bench_replay(lm, text, names, ev.Budget(budget, buffer=buffer), typer.echo)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(out, json.dumps(found, indent=1) + "\n")
    typer.echo(f"written to {out}")


@bench.command("views")
def bench_views(
    tokens: Annotated[int, typer.Option(help="Length of the trace on screen.")] = 32_768,
    runs: Annotated[int, typer.Option(help="The quickest counts.")] = 3,
    out: Annotated[Path, typer.Option(help="The JSON file.")] = Path("data/results/bench_views.json"),
) -> None:
    """The views in a headless browser: from a slider's move to the frame, build, redraw, and the size of a page."""
    from epiviz import bench

    try:
        found = bench.bench_views(tokens, runs, typer.echo)
    except (bench.BrowserMissingError, FileNotFoundError) as error:
        typer.echo(f"epiviz bench views: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"\n{bench.table(found)}\n")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(out, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    typer.echo(f"written to {out}")


calibrate = typer.Typer(no_args_is_help=True, help="Find what a method needs to know about a model beforehand.")
app.add_typer(calibrate, name="calibrate")


@calibrate.command("thinkv")
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

    try:
        found = calibration.calibrate(ev.load(model), [ev.Trace.load(path) for path in traces])
    except (calibration.CalibrationError, ev.TraceFileError, ev.ForeignTraceError, FileNotFoundError) as error:
        typer.echo(f"epiviz calibrate thinkv: {error}", err=True)
        raise typer.Exit(2) from error
    out = out or models.cache_directory() / thinkv.FILE
    found.save(out, command=f"epiviz calibrate thinkv {' '.join(map(str, traces))} --model {model}")
    typer.echo(f"{found}\nwritten to {out}")
