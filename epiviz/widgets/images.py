"""Images: timeline, layers and heads of a view as parts of a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from epiviz.text import printable
from epiviz.widgets.data import Story
from epiviz.widgets.looks import PALETTES
from epiviz.widgets.sheet import (
    ACCENT,
    ALIVE,
    GONE,
    INK,
    LOST,
    MUTED,
    NAMES,
    UNDERLINES,
    Block,
    known,
    pixel_columns,
    plot,
    ramp,
    sample,
    swatch,
)

if TYPE_CHECKING:
    from epiviz.widgets.png import Text
    from epiviz.widgets.view import View


def timeline(text: Text) -> Block:
    view, story, n = text.view, text.story, len(text.source)
    held = lives(story, story.death(view.scope), n, min(n, 700), min(n, 300))

    def paint(ax):
        colours = LinearSegmentedColormap.from_list("held", [LOST, ALIVE]).with_extremes(bad="white")
        ax.imshow(held, extent=(0, n, n, 0), aspect="auto", interpolation="nearest", cmap=colours, vmin=0, vmax=1)
        ax.axhline(view.step, color=ACCENT, lw=1)
        if view.selected >= 0:
            ax.axvline(view.selected + 0.5, color=INK, lw=1)
        ax.set_xlabel("token", fontsize=8, color=MUTED)
        ax.set_ylabel("step", fontsize=8, color=MUTED)

    whose = "" if story.uniform else f" until {view.threshold} % of the heads lost it"
    if view.layer >= 0:
        whose = f" in layer {view.layer}, head {view.head}"
    legend = [swatch(f"held{whose}", ALIVE), *([] if story.selects else [swatch("evicted", LOST)])]
    return plot(known(f"Timeline · {story.method}, budget {story.budget:,}"), 150, paint, legend)


def lives(story: Story, death: np.ndarray, tokens: int, width: int, height: int) -> np.ndarray:
    """Return the share of each pixel's tokens that are held, float64 ``[height, width]``; NaN before they exist.

    Row y stands for the step in its middle. A token is held from its own step on, until an event fires.
    """

    def row_of(step):
        return np.clip(np.ceil(np.asarray(step) * height / tokens - 0.5), 0, height).astype(np.int64)

    edges = pixel_columns(tokens, width)
    column = np.searchsorted(edges, np.arange(tokens), side="right") - 1
    births = row_of(np.arange(tokens) + 1)
    ends = np.full(tokens, height)
    ends[: len(death)] = np.append(row_of(story.retention.event_steps), height)[death]
    change = np.zeros((height + 1, len(edges)))
    np.add.at(change, (births, column), 1)
    np.add.at(change, (np.maximum(births, ends), column), -1)
    share = change.cumsum(axis=0)[:height] / np.bincount(column)
    share[np.arange(height)[:, None] < births[edges]] = np.nan
    return share


def layers(view: View, token: int) -> Block:
    score = next(score for score in view.data.layer_scores if score.name == view.layer_by)
    depth, n = score.values.shape
    edges = pixel_columns(n, 700)
    high, low = np.fmax.reduceat(score.values, edges, axis=1), np.fmin.reduceat(score.values, edges, axis=1)
    strongest = np.where(high >= -low, high, low) if score.kind == "signed" else high  # epiphanies are spikes

    def paint(ax):
        palette = [f"#{colour}" for colour in PALETTES[score.kind]]
        colours = LinearSegmentedColormap.from_list(score.kind, palette).with_extremes(bad="white")
        ends = score.clip if score.clip[0] < score.clip[1] else (score.clip[0] - 1, score.clip[0] + 1)
        ax.imshow(
            strongest,
            extent=(0, n, depth - 0.5, -0.5),
            aspect="auto",
            interpolation="nearest",
            cmap=colours,
            vmin=ends[0],
            vmax=ends[1],
        )
        for first, last in view.data.bands:
            ax.add_patch(
                Rectangle((1.008, first - 0.5), 0.006, last - first + 1, transform=ax.get_yaxis_transform(),
                          color=MUTED, lw=0, clip_on=False)
            )  # fmt: skip
        for layer in view.data.reference:
            ax.plot(1.02, layer, marker="<", ms=4, color=INK, transform=ax.get_yaxis_transform(), clip_on=False)
        if view.selected >= 0:
            ax.axvline(token + 0.5, color=INK, lw=1)
        if view.layer >= 0:
            ax.add_patch(Rectangle((0, view.layer - 0.5), n, 1, fill=False, edgecolor=ACCENT, lw=1))
        ax.set_xlabel("token", fontsize=8, color=MUTED)
        ax.set_ylabel("layer", fontsize=8, color=MUTED)

    marks = [sample("bars: bands, ◂: layers of EpiKV", MUTED)] if view.data.bands else []
    pixels = "" if len(edges) == n else f", each pixel the strongest of up to {-(-n // len(edges))} tokens"
    return plot(f"Layers · {score.name}{pixels}", max(96, min(240, 7 * depth)), paint, [*ramp(score), *marks])


def heads(text: Text, token: int) -> Block:
    view, story, retention = text.view, text.story, text.story.retention
    depth, width, fed = retention.death.shape
    fired = int(np.searchsorted(retention.event_steps, view.step, side="right"))
    evicting = np.isin(np.arange(depth), story.layers)[:, None]
    there = token < min(fed, view.step)
    held = (retention.death[:, :, token] >= fired) | ~evicting if there else np.zeros((depth, width), dtype=bool)
    faced = there and fired and token < retention.event_steps[fired - 1]
    reason = np.where(held & evicting, retention.reason[:, :, token], 0) if faced else np.zeros(held.shape, int)

    def paint(ax):
        colours = ListedColormap([LOST if there else "white", ALIVE])
        ax.imshow(held.T, aspect="auto", cmap=colours, vmin=0, vmax=1, extent=(-0.5, depth - 0.5, width - 0.5, -0.5))
        ax.set_xticks(np.arange(depth + 1) - 0.5, minor=True)
        ax.set_yticks(np.arange(width + 1) - 0.5, minor=True)
        ax.grid(which="minor", color="white", lw=1.5)
        ax.tick_params(which="minor", length=0)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        for layer, head in np.argwhere(~held if there else held):
            ax.plot([layer - 0.3, layer + 0.3], [head, head], color=GONE, lw=0.8)
        for code, (thickness, dash, _) in UNDERLINES.items():
            for layer, head in np.argwhere(reason == code):
                ax.plot([layer - 0.3, layer + 0.3], [head + 0.25] * 2, color="white", lw=thickness, ls=dash)
        ax.set_xlabel("layer", fontsize=8, color=MUTED)
        ax.set_ylabel("KV head", fontsize=8, color=MUTED)

    inside = token < len(text.source)  # of several texts some may be shorter
    piece = f" ‘{known(printable(text.source.spans.piece(token)))[:24]}’" if inside else ""
    evicting_held = held[evicting[:, 0]]
    fate = (
        f"held by {evicting_held.sum()} of {evicting_held.size} heads" if there else "not there yet, or never fed back"
    )
    title = f"Heads · token {token:,}{piece} at step {view.step:,}: {fate}"
    title = known(f"{title} · {story.method}")
    why = [sample(NAMES[r], MUTED, reason=r) for r in UNDERLINES if (reason == r).any()]
    legend = [swatch("held", ALIVE), swatch("evicted", LOST), *why]
    return plot(title, max(40, 18 * width), paint, legend)
