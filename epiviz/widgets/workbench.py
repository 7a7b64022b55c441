"""Workbench: the reader with a timeline, a layer map and a head map, linked; each also stands alone."""

from __future__ import annotations

from epiviz.widgets.build import is_trace
from epiviz.widgets.view import View


class Workbench(View):
    """A trace and its replays in four linked views: text, timeline, layers and heads.

    Parameters and traits are those of :class:`TraceReader`. A click in any view selects a token in all, a drag over the
    timeline moves the step, a click on a head shows its cache in the text.

    Examples
    --------
    >>> bench = Workbench(trace, grid, model=model)              # doctest: +SKIP
    >>> bench.budget = 200; bench.wait()                         # doctest: +SKIP
    >>> bench.to_html("workbench.html")                          # doctest: +SKIP
    """

    kind = "workbench"
    shows_layers = True


class Timeline(View):
    """Token × step: each token from its birth to the eviction that took it, one plot for each method.

    Parameters and traits are those of :class:`TraceReader`.
    """

    kind = "timeline"


class LayerMap(View):
    """Layer × token: a score of every layer along a trace, in each pixel the strongest of its tokens.

    Parameters and traits are those of :class:`TraceReader`; the source is a trace. Brackets mark the bands of EpiKV,
    arrows the two layers of its score.
    """

    kind = "layers"
    shows_layers = True

    def __init__(self, source, runs=(), **keywords) -> None:
        if not is_trace(source):
            raise TypeError(f"a layer map shows a Trace, got {type(source).__name__}")
        super().__init__(source, runs, **keywords)


class HeadMap(View):
    """Layers × KV heads: which of them still hold the selected token at the current step, and why they keep it.

    Parameters and traits are those of :class:`TraceReader`.
    """

    kind = "heads"
