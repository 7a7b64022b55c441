"""What evaluations found: accuracy, differences on the same problems, and what the other texts came to.

Every function takes the frame of :func:`epiviz.evaluate`, or several joined by ``pd.concat``. A condition is a policy
under a budget, with or without a protected prompt, with one way to number kept tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from epiviz import stats
from epiviz.tasks.outcomes import OUTCOMES, UNGRADED

CONDITION = ["policy", "budget", "protect_prompt", "positions"]
SETTINGS = ("model", "sinks", "recent", "buffer", "slots", "study", "task", "protocol")  # no part of a condition
LIMIT = CONDITION[1:]  # what two policies must share to be compared; the full cache has no limit


def accuracy(frame: pd.DataFrame, level: float = stats.LEVEL) -> pd.DataFrame:
    """Return the accuracy of each condition, and that of the texts in which something was evicted.

    Texts that ended in an error do not count; all other texts do, whatever became of them. Where some are not graded
    here, code, there is no accuracy: it is NaN.

    Parameters
    ----------
    frame : pandas.DataFrame
    level : float
        Coverage of the intervals, which take the problems as the sample; see :func:`epiviz.stats.accuracy`.

    Returns
    -------
    pandas.DataFrame
        One row per ``policy``, ``budget``, ``protect_prompt`` and ``positions``: ``n`` (texts), ``problems``,
        ``seeds``, ``errors``; ``accuracy`` with ``low`` and ``high``; ``evicted`` (share of the texts), ``n_evicted``,
        and among these ``accuracy_evicted`` with ``evicted_low`` and ``evicted_high``, and ``full_evicted``, what the
        full cache reaches on the same problems (NaN if it was not run): the problems that evict are the longer ones;
        means of ``tokens``, ``mean_slots``, ``kv_mib`` and ``state_mib``; ``bounded``; ``seconds`` (all texts).

    Raises
    ------
    ValueError
        The frame is empty, or has a text of a condition twice: joined frames of several models, of budgets that differ
        in their recent tokens alone, …
    """
    full = _valid(frame[frame["policy"] == "full"]).groupby("problem")["correct"].mean()
    rows = []
    for condition, texts in _conditions(frame):
        valid = _valid(texts)
        evicted = valid[valid["evicted"].astype(bool)]
        found, among = (_accuracy(part, level) for part in (valid, evicted))
        beside = full.reindex(evicted["problem"])
        rows.append(
            {
                **condition,
                "n": len(texts),
                "problems": texts["problem"].nunique(),
                "seeds": texts["seed"].nunique(),
                "errors": len(texts) - len(valid),
                "accuracy": found.value,
                "low": found.low,
                "high": found.high,
                "evicted": len(evicted) / len(valid) if len(valid) else np.nan,
                "n_evicted": len(evicted),
                "accuracy_evicted": among.value,
                "evicted_low": among.low,
                "evicted_high": among.high,
                "full_evicted": beside.mean() if beside.notna().all() and np.isfinite(among.value) else np.nan,
                **{name: valid[name].astype(float).mean() for name in ("tokens", "mean_slots", "kv_mib", "state_mib")},
                "bounded": bool(texts["bounded"].all()),
                "seconds": texts["seconds"].sum(),
            }
        )
    return pd.DataFrame(rows)


def accuracy_over_budgets(frame: pd.DataFrame, level: float = stats.LEVEL) -> pd.DataFrame:
    """Return the accuracy of each policy over several budgets together, as :func:`accuracy` with ``budget`` NaN.

    Only budgets count that every policy was run under, with a protected prompt and without if there are both. A
    problem's texts under all budgets are one cluster.

    Returns
    -------
    pandas.DataFrame
        Its ``attrs["budgets"]`` tells them.

    Raises
    ------
    ValueError
        There is no such budget.
    """
    limited = frame[frame["budget"].notna()]
    under = limited.groupby(["protect_prompt", "policy"])["budget"].unique()
    common = sorted(set.intersection(*map(set, under))) if len(under) else []
    if not common:
        raise ValueError(f"no budget was run by all of {', '.join(sorted(set(limited['policy']))) or 'no policy'}")
    whole = pd.concat([frame[frame["budget"].isna()], limited[limited["budget"].isin(common)]])
    # as if they were samples of the problem
    table = accuracy(whole.assign(budget=np.nan, sample=range(len(whole))), level)
    table.attrs["budgets"] = common
    return table


def paired_accuracy(frame: pd.DataFrame, control: str = "random", level: float = stats.LEVEL) -> pd.DataFrame:
    """Return each policy's difference in accuracy to a control on the same problems under the same limit.

    Samples and seeds of a problem are averaged first. Problems that either did not finish without an error are left
    out.

    Parameters
    ----------
    frame : pandas.DataFrame
    control : str
        A policy; ``full`` is compared with everything.
    level : float
        Coverage of the bootstrap intervals over problems.

    Returns
    -------
    pandas.DataFrame
        One row per condition but the control's: ``n`` (problems), ``difference`` (control subtracted) with ``low`` and
        ``high``, ``p`` (signs flipped), ``p_holm``, which allows for all the policies compared under one limit, and
        ``compared``, how many they are.

    Raises
    ------
    ValueError
        The frame is empty, or has no such control, or texts twice, or texts that are not graded here.
    """
    found = [(condition, _per_problem(texts)) for condition, texts in _conditions(frame)]
    controls = {_limit(condition): means for condition, means in found if condition["policy"] == control}
    if not controls:
        raise ValueError(f"there is no policy {control!r} to compare with; there are {sorted(set(frame['policy']))}")
    rows = []
    for condition, means in found:
        beside = next(iter(controls.values())) if control == "full" else controls.get(_limit(condition))
        if condition["policy"] == control or beside is None:
            continue
        both = pd.concat([means, beside], axis=1, join="inner", keys=["own", "control"]).dropna()
        paired = stats.paired_difference(both["own"].to_numpy(), both["control"].to_numpy(), level=level)
        apart = paired.estimate
        told = {"n": paired.n, "difference": apart.value, "low": apart.low, "high": apart.high, "p": paired.p}
        rows.append(condition | told)
    table = pd.DataFrame(rows, columns=[*CONDITION, "n", "difference", "low", "high", "p"])
    groups = table.groupby(LIMIT, dropna=False, sort=False)["p"]
    table["p_holm"] = groups.transform(lambda p: stats.holm(p.to_numpy()))
    return table.assign(compared=groups.transform("count"))


def outcomes(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the share of each outcome in each condition.

    Returns
    -------
    pandas.DataFrame
        One row per condition and ``outcome`` that occurs anywhere, in the order of
        :data:`epiviz.tasks.outcomes.OUTCOMES`: ``count``, ``n`` (texts of the condition), ``share``.
    """
    there = [name for name in (*OUTCOMES, UNGRADED) if (frame["outcome"] == name).any()]
    rows = []
    for condition, texts in _conditions(frame):
        for name in there:
            count = int((texts["outcome"] == name).sum())
            rows.append({**condition, "outcome": name, "count": count, "n": len(texts), "share": count / len(texts)})
    return pd.DataFrame(rows)


def seed_spreads(frame: pd.DataFrame) -> pd.DataFrame:
    """Return how far draws move the accuracy of each condition that was run with several seeds.

    Returns
    -------
    pandas.DataFrame
        One row per condition: ``seeds``, ``problems``, ``accuracy``, ``lowest`` and ``highest`` of a seed, ``seed_sd``
        and ``problem_sd``; see :class:`epiviz.stats.SeedSpread`. Problems with an error under a seed are left out.
    """
    rows = []
    for condition, texts in _conditions(frame):
        wide = _graded(texts).pivot_table("correct", "seed", "problem").dropna(axis=1)
        if min(wide.shape) < 2:
            continue
        found = stats.seed_spread(wide.to_numpy(dtype=float))
        means = found.accuracies
        told = {"accuracy": means.mean(), "lowest": means.min(), "highest": means.max()}
        sizes = {"seeds": found.seeds, "problems": found.problems}
        rows.append({**condition, **sizes, **told, "seed_sd": found.seed_sd, "problem_sd": found.problem_sd})
    names = ["seeds", "problems", "accuracy", "lowest", "highest", "seed_sd", "problem_sd"]
    return pd.DataFrame(rows, columns=[*CONDITION, *names])


def pass_at_k(frame: pd.DataFrame, k: Sequence[int] = (1,)) -> pd.DataFrame:
    """Return pass@k of each condition, unbiased; samples and seeds of a problem are its samples.

    Returns
    -------
    pandas.DataFrame
        One row per condition and ``k``: ``n`` (problems), ``samples`` (the fewest of a problem), ``pass_at_k`` with
        ``low`` and ``high`` (Student's t over problems, cut to [0, 1]). At k = 1 it is the mean over samples,
        avg@samples.

    Raises
    ------
    ValueError
        A problem has fewer samples than k, or texts that are not graded here.
    """
    rows = []
    for condition, texts in _conditions(frame):
        counts = _graded(texts).groupby("problem")["correct"].agg(["sum", "count"])
        for each in k:
            chances = stats.pass_at_k(counts["sum"].to_numpy(), counts["count"].to_numpy(), each)
            found = stats.clustered_mean(chances, counts.index.to_numpy())
            row = {**condition, "k": each, "n": len(counts), "samples": counts["count"].min() if len(counts) else 0}
            low, high = np.clip([found.low, found.high], 0, 1)
            rows.append(row | {"pass_at_k": found.value, "low": low, "high": high})
    return pd.DataFrame(rows)


def same_answers(frame: pd.DataFrame, reference: pd.DataFrame) -> tuple[int, float]:
    """Return how many texts two evaluations have in common, and in which share of them outcome and answer agree.

    Texts are in common if problem, sample, seed and condition are. NaN if there are none.
    """
    keys = ["problem", "sample", "seed", *CONDITION]
    ours, theirs = (
        pd.concat([texts.assign(**condition) for condition, texts in _conditions(each)]) for each in (frame, reference)
    )
    both = ours.merge(theirs.drop_duplicates(keys), on=keys, suffixes=("", "_reference"))  # pandas: NaN meets NaN
    same = (both["answer"] == both["answer_reference"]) & (both["outcome"] == both["outcome_reference"])
    return len(both), float(same.mean()) if len(both) else np.nan


def _conditions(frame: pd.DataFrame) -> Iterator[tuple[dict, pd.DataFrame]]:
    """Yield each condition and its texts, in the frame's order."""
    if frame.empty:
        raise ValueError("the frame has no rows; evaluate at least one policy")
    plain = frame.assign(protect_prompt=frame["protect_prompt"].astype("boolean").fillna(False).astype(bool))
    # -1 for "no budget": NaN is not equal to itself, and could not be looked up
    plain["budget"] = plain["budget"].fillna(-1.0)
    for values, texts in plain.groupby(CONDITION, sort=False):
        condition = dict(zip(CONDITION, values, strict=True))
        _check_once(condition, texts)
        yield condition | {"budget": np.nan if condition["budget"] < 0 else condition["budget"]}, texts


def _check_once(condition: dict, texts: pd.DataFrame) -> None:
    """Refuse a condition that has a text twice: what differs there would be averaged away, and counted as certainty."""
    twice = texts[texts.duplicated(["problem", "sample", "seed"], keep=False)]
    if len(twice):
        others = [name for name in SETTINGS if name in twice and len(twice[name].unique()) > 1]
        raise ValueError(
            f"{len(twice)} texts of {condition['policy']} are of the same problem, sample and seed"
            + (f", and differ in {' and '.join(others)}" if others else "")
            + "; choose the rows that belong together"
        )


def _limit(condition: dict) -> tuple:
    return tuple(condition[name] for name in LIMIT)


def _valid(texts: pd.DataFrame) -> pd.DataFrame:
    return texts[texts["outcome"] != "error"]


def _graded(texts: pd.DataFrame) -> pd.DataFrame:
    valid = _valid(texts)
    if ungraded := (valid["outcome"] == UNGRADED).sum():
        raise ValueError(
            f"{ungraded} texts are code, which is not graded here: write them to a file with "
            "epiviz.tasks.export_completions and grade them in a sandbox"
        )
    return valid


def _accuracy(valid: pd.DataFrame, level: float) -> stats.Estimate:
    if (valid["outcome"] == UNGRADED).any():
        return stats.Estimate(np.nan, np.nan, np.nan)
    return stats.accuracy(valid["correct"], valid["problem"], level)


def _per_problem(texts: pd.DataFrame) -> pd.Series:
    return _graded(texts).groupby("problem")["correct"].mean()
