"""The progress of a sweep, in a notebook: how many runs are where, what is running, what failed."""

from __future__ import annotations

import os
import threading
from html import escape

import ipywidgets as widgets
import pandas as pd

from epiviz.sweeps import Sweep, duration, status
from epiviz.widgets.looks import visible

STATES = {"done": "success", "failed": "danger", "stopped": "warning"}
SHOWN = 12  # runs listed by name


class SweepMonitor(widgets.VBox):
    """A bar, counts, and the runs that are being made or failed; see :func:`sweep_monitor`.

    Attributes
    ----------
    table : pandas.DataFrame
        The state of every run at the last look, as :func:`epiviz.sweeps.status` gives it.
    """

    def __init__(self, folder: str | os.PathLike, every: float = 2.0) -> None:
        self.folder = folder
        self._name = Sweep.load(folder).folder.name
        self._bar = widgets.IntProgress(min=0, layout={"width": "100%"})
        self._text = widgets.HTML()
        super().__init__([self._bar, self._text])
        self._over = threading.Event()
        self.look()
        # Returns at once: the notebook goes on. The thread ends with the sweep, with stop(), or with the kernel.
        threading.Thread(target=self._watch, args=(every,), daemon=True).start()

    def look(self) -> pd.DataFrame:
        """Look at the folder again, and return the state of every run."""
        self.table = status(self.folder)
        ended = self.table["status"].isin(list(STATES)).sum()
        self._bar.max, self._bar.value = len(self.table), int(ended)
        worst = [STATES[state] for state in STATES if (self.table["status"] == state).any()]
        self._bar.bar_style = worst[-1] if worst else ""
        self._bar.tooltip = self.summary()
        self._text.value = self._html()
        return self.table

    def stop(self) -> None:
        """Stop looking; the sweep goes on."""
        self._over.set()

    def summary(self) -> str:
        """Return counts, and how long the rest may take, in a line."""
        counts = self.table["status"].value_counts()
        parts = [f"{n} {state}" for state, n in counts.items()]
        left, running = counts.get("planned", 0), counts.get("running", 0)
        took = self.table.loc[self.table["status"] == "done", "seconds"]
        if left and running and len(took):
            parts.append(f"about {duration(left * took.median() / running)} for those that wait")
        return f"{self._name}: {len(self.table)} runs, {', '.join(parts)}"

    def _watch(self, every: float) -> None:
        while not self._over.wait(every):
            if not self.look()["status"].isin(["planned", "running"]).any():
                return

    def _html(self) -> str:
        notable = self.table[self.table["status"].isin(["running", "failed", "stopped"])]
        axes = [name for name in self.table if name not in ("run", "status", "seconds", "host", "device", "told")]
        rows = [
            "<tr>" + "".join(f"<td>{_cell(row[name])}</td>" for name in [*axes, "status", "host", "told"]) + "</tr>"
            for _, row in notable.head(SHOWN).iterrows()
        ]
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in [*axes, "status", "host", "told"])
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>" if rows else ""
        more = f"<p>and {len(notable) - SHOWN} more</p>" if len(notable) > SHOWN else ""
        return f'<p role="status">{escape(self.summary())}</p>{table}{more}'

    def _repr_mimebundle_(self, **kwargs) -> tuple[dict, dict] | dict:
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        return data | {"text/plain": repr(self), "text/html": self._html()}, metadata

    def __repr__(self) -> str:
        return f"SweepMonitor({self.summary()})"


def sweep_monitor(folder: str | os.PathLike, every: float = 2.0) -> SweepMonitor:
    """Watch a sweep from a notebook while it runs elsewhere: a terminal, another kernel, a cluster.

    Parameters
    ----------
    folder : str or path
        The sweep's folder.
    every : float
        Seconds between two looks.

    Raises
    ------
    FileNotFoundError
        The folder holds no sweep.
    """
    return SweepMonitor(folder, every)


def _cell(value) -> str:
    return "" if value is None or value != value else escape(visible(str(value)))
