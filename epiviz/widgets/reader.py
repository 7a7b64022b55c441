"""TraceReader: the text of a trace or of generated runs, with what a cache keeps and loses."""

from __future__ import annotations

from epiviz.widgets.view import View


class TraceReader(View):
    """Read a trace under a budget, replays of policies over it, or texts generated under eviction.

    The badge in the header says which of the three is on screen: a *static ranking* (a token is struck if its rank by
    the colour-by score is not below the budget: a thought experiment), a *replay*, or *generated* text.

    Parameters
    ----------
    source : Trace, Run, Replay, or a list of Runs or of Replays
        A list of up to three runs is read side by side.
    runs : Replay, list of Replays or ReplayGrid
        Replays of ``source``, if that is a trace. Of a grid, those of ``source``.
    scores : mapping of name to (array, kind, unit), optional
        What to colour by. ``kind`` is "signed" or "magnitude", the array ``[tokens]`` (a list of arrays for a list of
        runs). Without it a trace offers its epiphany score, surprisal and value range.
    layer_scores : mapping of name to (array, kind, unit), optional
        What the layer map shows, arrays ``[layers, tokens]``. Without it the displacement's z-score and value ranges.
    title : str, optional
    model : Model, optional
        Computes what was not: any budget of ``methods``, in the background. :meth:`wait` returns when it is there.
    compute : callable, optional
        Instead of a model: ``compute(method, budget, watch)`` returns a Replay and calls ``watch`` with the tokens seen
        so far (or passes it on as ``on_event``), which raises when Stop is pressed.
    methods : iterable of str or Policy, optional
        What can be computed; by default every policy that evicts, or with ``compute`` the policies of ``runs``.
    **controls
        Initial values of the traits below.

    Attributes
    ----------
    color_by, layer_by, method : str
    beside : list of str
        Up to two other methods, shown side by side with ``method``.
    budget, step : int
        Brought to the nearest value that can be shown.
    layer, head : int
        The head whose cache is shown; ``layer = -1`` means all heads.
    threshold : int
        With all heads: a token counts as evicted once this percentage of them has lost it (10, 25, 50, 75 or 90).
    selected, column : int
        The pinned token (-1: none) and the text it belongs to.
    data : ReaderData
        What is shown, as plain arrays.

    All are traits: ``observe``, ``link``, ``jslink`` and ``interact`` work. Observers may run in any thread.

    Examples
    --------
    >>> reader = TraceReader(trace, budget=128)                  # doctest: +SKIP
    >>> reader.observe(lambda change: print(change.new), "selected")  # doctest: +SKIP
    >>> reader.to_html("reader.html")                            # doctest: +SKIP
    """

    kind = "reader"
