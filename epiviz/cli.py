"""The command line: ``epiviz study``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epiviz import runs
from epiviz.parameters import ParameterError

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
