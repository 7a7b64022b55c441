"""The algebra of eviction histories: lifetimes, the overlap of two, and who survives better than chance.

Pure functions over births and deaths. Everything is counted for the layers that evict, head by head; layers are gone
through one by one, so that 32k tokens × 1,000 heads need little more memory than the history itself.

*Chance* is a random eviction with the same sizes: at every event, each head loses as many candidates as it really
lost, drawn uniformly. An old token has faced more events than a new one, and its chance is smaller; a comparison with
one kept share for all tokens would call every method that prefers new tokens skilful.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from epiviz.policies.base import ResolvedBudget
from epiviz.retention import Retention


@dataclass(frozen=True)
class Lifetimes:
    """How long each slot was held.

    Attributes
    ----------
    steps : int32 ``[evicting layers, kv_heads, tokens]``
        Later tokens that could attend to the slot.
    censored : bool, same shape
        The slot was still held at the end: its lifetime is at least ``steps``.
    """

    steps: np.ndarray
    censored: np.ndarray


def lifetimes(history: Retention) -> Lifetimes:
    """Return how many later tokens each slot lived to see, and which slots outlived the text."""
    shape = (len(history.evicting), *history.death.shape[1:])
    steps, censored = np.empty(shape, dtype=np.int32), np.empty(shape, dtype=bool)
    ends = np.append(history.event_steps, history.tokens).astype(np.int32)
    born = np.arange(1, history.tokens + 1, dtype=np.int32)
    for index, layer in enumerate(history.evicting):
        steps[index] = ends[history.death[layer]] - born
        censored[index] = history.death[layer] == history.events
    return Lifetimes(steps, censored)


def survival_curve(lives: Lifetimes, member: np.ndarray | None = None) -> np.ndarray:
    """Return the share of slots still held at each age (Kaplan and Meier, 1958).

    Slots that outlived the text count as long as they were watched. The curve is 0 from where nobody is left.

    Parameters
    ----------
    lives : Lifetimes
    member : bool ``[tokens]``, optional
        Only these tokens.

    Returns
    -------
    float64 ``[longest life + 1]``
        Entry a: still held once ``a`` later tokens were seen.

    Examples
    --------
    >>> lives = Lifetimes(np.array([[[1, 2, 3]]], dtype=np.int32), np.array([[[False, True, False]]]))
    >>> survival_curve(lives).round(3).tolist()
    [1.0, 0.667, 0.667, 0.0]
    """
    member = slice(None) if member is None else np.asarray(member, dtype=bool)
    tokens = lives.steps.shape[-1]
    ended, died = np.zeros(tokens + 1, dtype=np.int64), np.zeros(tokens + 1, dtype=np.int64)
    for steps, censored in zip(lives.steps, lives.censored, strict=True):
        steps, censored = steps[:, member].ravel(), censored[:, member].ravel()
        ended += np.bincount(steps, minlength=tokens + 1)
        died += np.bincount(steps[~censored], minlength=tokens + 1)
    longest = int(np.flatnonzero(ended).max(initial=0))
    ended, died = ended[: longest + 1], died[: longest + 1]
    at_risk = ended[::-1].cumsum()[::-1]
    return np.cumprod(1 - died / np.maximum(at_risk, 1))


@dataclass(frozen=True)
class Overlap:
    """How many slots two histories share.

    Attributes
    ----------
    both, first, second : ``[evicting layers, kv_heads]``
        Slots held by both, by the first and by the second; expected numbers if one of them is chance.
    """

    both: np.ndarray
    first: np.ndarray
    second: np.ndarray

    @property
    def jaccard(self) -> np.ndarray:
        """Shared slots ÷ slots that either holds, for each head; NaN where both hold nothing."""
        with np.errstate(invalid="ignore"):
            return self.both / (self.first + self.second - self.both)

    @property
    def overall(self) -> float:
        """Mean of :attr:`jaccard` over the heads that hold anything; NaN if none does."""
        jaccard = self.jaccard
        return float(jaccard[~np.isnan(jaccard)].mean()) if not np.isnan(jaccard).all() else np.nan


def overlap(
    first: Retention,
    second: Retention,
    step: int | None = None,
    *,
    among: np.ndarray | None = None,
) -> Overlap:
    """Count the slots that two histories of one text share.

    Parameters
    ----------
    first, second : Retention
    step : int, optional
        Tokens seen; the last step of the shorter history if not given.
    among : bool ``[tokens]``, optional
        Count these tokens only, for instance those that were :func:`contested`.

    Raises
    ------
    ValueError
        The histories have other layers or heads, or one of them has not seen so many tokens.
    """
    layers, heads, _ = first.death.shape
    if second.death.shape[:2] != (layers, heads) or first.evicting != second.evicting:
        raise ValueError(
            f"the histories have {layers} layers × {heads} heads and {second.death.shape[0]} × "
            f"{second.death.shape[1]}, evicting in {len(first.evicting)} and {len(second.evicting)} layers; compare "
            "runs of one model"
        )
    step = min(first.tokens, second.tokens) if step is None else step
    chosen = slice(step) if among is None else np.flatnonzero(np.asarray(among, dtype=bool)[:step])
    fired = first.fired(step), second.fired(step)
    counts = np.empty((3, len(first.evicting), heads), dtype=np.int64)
    for index, layer in enumerate(first.evicting):
        a, b = (h.death[layer][:, chosen] >= done for h, done in zip((first, second), fired, strict=True))
        counts[:, index] = (a & b).sum(-1), a.sum(-1), b.sum(-1)
    return Overlap(*counts)


def overlap_by_chance(history: Retention, budget: ResolvedBudget | None, step: int | None = None) -> Overlap:
    """Return how many contested slots a history is expected to share with a random eviction of its own sizes.

    The expected number of shared slots, over the number expected in either: their ratio is close to the mean Jaccard
    index of many draws, and not exactly it.
    """
    step = history.tokens if step is None else step
    faced, fired = first_event(history, budget, step), history.fired(step)
    among = np.flatnonzero(faced < fired)
    both, kept = (np.empty((len(history.evicting), history.death.shape[1])) for _ in range(2))
    for index, layer in enumerate(history.evicting):
        alive = history.death[layer][:, among] >= fired
        likely = chance(history.death[layer], faced, fired)
        both[index] = np.where(alive, likely[:, faced[among]], 0.0).sum(-1)
        kept[index] = alive.sum(-1)
    return Overlap(both, kept, kept)


def first_event(history: Retention, budget: ResolvedBudget | None, step: int | None = None) -> np.ndarray:
    """Return the first event at which each token could have been evicted, int64 ``[tokens]``.

    ``history.fired(step)`` for tokens that never could by then: sinks, a protected prompt, tokens still recent at the
    last event, and all tokens of a run without a budget.
    """
    fired = history.fired(history.tokens if step is None else step)
    if budget is None:
        return np.full(history.tokens, fired)
    token = np.arange(history.tokens)
    event = np.searchsorted(history.event_steps[:fired] - budget.recent, token, side="right")
    return np.where(token < budget.front, fired, event)


def contested(history: Retention, budget: ResolvedBudget | None, step: int | None = None) -> np.ndarray:
    """Return the tokens whose fate a policy decided by ``step``, bool ``[tokens]``.

    The others are protected by the budget or too new, and are held by every policy alike.
    """
    step = history.tokens if step is None else step
    return first_event(history, budget, step) < history.fired(step)


def chance(death: np.ndarray, faced: np.ndarray, fired: int) -> np.ndarray:
    """Return how likely a random eviction with the same sizes would still hold a token, in the heads of one layer.

    Parameters
    ----------
    death : int32 ``[kv_heads, tokens]``
        Of one layer: the event at which each slot left.
    faced : int64 ``[tokens]``
        :func:`first_event`.
    fired : int
        Events so far.

    Returns
    -------
    float64 ``[kv_heads, fired + 1]``
        By the event that a token faced first; the last entry, for tokens that never faced one, is 1. Summed over the
        tokens, it gives exactly the slots that the head holds.

    Raises
    ------
    ValueError
        The history lost tokens that its budget protects.
    """
    death = np.minimum(death, fired)
    if (wrong := death < faced).any():
        head, token = np.argwhere(wrong)[0]
        raise ValueError(
            f"head {head} lost token {token} at event {death[head, token]}, but the budget protects it until event "
            f"{faced[token]}; pass the budget that the history was made with"
        )
    heads = len(death)
    place = death + (fired + 1) * np.arange(heads)[:, None]
    lost = np.bincount(place.ravel(), minlength=(fired + 1) * heads).reshape(heads, fired + 1)[:, :fired]
    joined = np.bincount(faced, minlength=fired + 1)[:fired]
    candidates = joined.cumsum() - (lost.cumsum(-1) - lost)
    stays = 1 - lost / np.maximum(candidates, 1)
    through = np.flip(np.cumprod(np.flip(stays, -1), axis=-1), -1)
    return np.concatenate([through, np.ones((heads, 1))], axis=-1)


def held_by_chance(history: Retention, budget: ResolvedBudget | None, step: int | None = None) -> np.ndarray:
    """Return the share of the evicting heads that would hold each token by chance at ``step``, float64 ``[tokens]``."""
    step = history.tokens if step is None else step
    faced, fired = first_event(history, budget, step), history.fired(step)
    share = np.mean([chance(history.death[layer], faced, fired).mean(0) for layer in history.evicting], axis=0)[faced]
    share[step:] = 0
    return share


@dataclass(frozen=True)
class Survival:
    """Who of the contested tokens is still held.

    Attributes
    ----------
    groups : ``[groups]``
        Their names, sorted.
    tokens : int64 ``[groups]``
        Contested tokens of each.
    kept, expected : float64 ``[groups, evicting layers, kv_heads]``
        Share that the head holds, and would hold by chance. NaN for a group without contested tokens.
    """

    groups: np.ndarray
    tokens: np.ndarray
    kept: np.ndarray
    expected: np.ndarray


def survival(
    history: Retention, groups: np.ndarray | Sequence, budget: ResolvedBudget | None, step: int | None = None
) -> Survival:
    """Return the kept share of every group of tokens beside the share expected by chance.

    With a bool label as groups it tells the agreement of an eviction with that label: the kept share outside (False)
    and inside (True). With :func:`epiviz.token_classes.classify` it tells who survives by class.

    Parameters
    ----------
    history : Retention
    groups : ``[tokens or more]``
        One value for each token; values behind the last fed token are ignored.
    budget : ResolvedBudget or None
        The budget of the run, which tells what was protected; None for a run that never evicts.
    step : int, optional
        Tokens seen; the last step if not given.

    Raises
    ------
    ValueError
        There are fewer values than tokens, or the history does not fit the budget.
    """
    step = history.tokens if step is None else step
    groups = np.asarray(groups)
    if groups.ndim != 1 or len(groups) < history.tokens:
        raise ValueError(f"a history of {history.tokens} tokens needs a group for each of them, got {groups.shape}")
    names, member = np.unique(groups[: history.tokens], return_inverse=True)
    faced, fired = first_event(history, budget, step), history.fired(step)
    among = np.flatnonzero(faced < fired)
    # float32 counts exactly up to 2**24 tokens, and makes the sums over tokens one matrix product.
    belongs = np.zeros((len(among), len(names)), dtype=np.float32)
    belongs[np.arange(len(among)), member[among]] = 1
    joined = np.zeros((fired + 1, len(names)))
    np.add.at(joined, (faced[among], member[among]), 1)
    tokens = joined.sum(0)
    kept, expected = (np.empty((len(names), len(history.evicting), history.death.shape[1])) for _ in range(2))
    for index, layer in enumerate(history.evicting):
        alive = (history.death[layer][:, among] >= fired).astype(np.float32)
        kept[:, index] = (alive @ belongs).T
        expected[:, index] = (chance(history.death[layer], faced, fired) @ joined).T
    with np.errstate(invalid="ignore"):
        kept, expected = (x / tokens[:, None, None] for x in (kept, expected))
    return Survival(names, tokens.astype(np.int64), kept, expected)
