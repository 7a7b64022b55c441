"""``recall``: codes stated early, and one of them asked for after a stretch of text that has nothing to do with them.

The prompt alone is the test: what a policy evicts of the codes while the rest is read or the reply is written cannot be
told any more. The reply's first token still sees the whole prompt, which is cut right after it was read; a reply that
names the thing before its code, as models do, has to find the code in what was kept.
"""

from __future__ import annotations

import numpy as np

from epiviz.tasks.problems import Problem

# Words; a prompt of 458 tokens on average. SmolLM2-135M with its full cache is right in 66 of 100 problems (95%
# interval 56 to 75): little is left to lose to a longer text.
FILLER = 300

ADJECTIVES = ("red", "blue", "green", "white", "black", "silver", "golden", "grey", "brown", "yellow")
THINGS = ("door", "box", "locker", "safe", "gate", "cabinet", "drawer", "trunk", "garage", "cellar")
WHO = (
    *("the gardener", "a young teacher", "the baker", "an old sailor", "the librarian", "a tall farmer"),
    *("the postman", "her neighbour", "the painter", "a quiet tailor", "the doctor", "his cousin"),
)
DID = (
    *("carried a lantern", "read a long letter", "mended a wooden fence", "watched the clouds", "picked some apples"),
    *("sang an old song", "waited for the ferry", "drew a map", "told a story", "repaired a bicycle", "planted roses"),
    *("bought fresh bread", "listened to the rain", "counted the boats", "looked for a lost dog", "cooked some soup"),
)
WHERE = (
    *("near the river", "behind the mill", "in the village square", "by the lake", "under a large oak"),
    *("at the edge of the forest", "on the hill", "beside the station", "in the small harbour", "across the bridge"),
)
WHEN = (
    *("In the morning", "After lunch", "Late in the evening", "On a windy day", "Before sunset", "In early spring"),
    *("During the holidays", "One cold night", "At noon", "When the bells rang", "Last summer", "On market day"),
)


def load_recall(n: int, seed: int = 0, *, filler: int = FILLER, facts: int = 4) -> list[Problem]:
    """Return ``n`` problems; problem i does not depend on how many others are made.

    Parameters
    ----------
    n, seed : int
    filler : int
        Words between the codes and the question.
    facts : int
        Codes stated, 1 to 100; one is asked for, the others can be mistaken for it.

    Raises
    ------
    ValueError
        ``filler`` is negative, or there are not so many things to have codes.
    """
    if filler < 0:
        raise ValueError(f"filler is a number of words, 0 or more, got {filler}")
    most = len(ADJECTIVES) * len(THINGS)
    if not 1 <= facts <= most:
        raise ValueError(f"facts must be 1 to {most}, got {facts}")
    return [make_problem(seed, index, filler=filler, facts=facts) for index in range(n)]


def make_problem(seed: int, index: int, *, filler: int, facts: int) -> Problem:
    """Return one problem, a pure function of its arguments."""
    rng = np.random.default_rng([seed, index, facts])  # the same codes whatever the filler: lengths can be paired
    places = rng.permutation(len(ADJECTIVES) * len(THINGS))[:facts]
    things = [f"{ADJECTIVES[place % len(ADJECTIVES)]} {THINGS[place // len(ADJECTIVES)]}" for place in places]
    codes = [str(code) for code in 1000 + rng.permutation(9000)[:facts]]
    asked = int(rng.integers(facts))
    stated = " ".join(f"The code of the {thing} is {code}." for thing, code in zip(things, codes, strict=True))
    between = filler_text(rng, filler)
    prompt = "\n\n".join(
        [
            f"Remember these codes. {stated}",
            *([between] if between else []),
            f"What is the code of the {things[asked]}? Answer in one sentence.",
        ]
    )
    meta = {"filler": filler, "facts": facts, "asked": asked, "candidates": codes}
    return Problem(
        f"recall-{facts}-{filler}-{seed}-{index}",
        prompt,
        codes[asked],
        f"The code of the {things[asked]} is {codes[asked]}.",
        meta,
        "mention",
    )


def filler_text(rng: np.random.Generator, words: int) -> str:
    """Return sentences of exactly so many words in all, without digits and without the things that have codes."""
    written: list[str] = []
    while len(written) < words:
        written += _sentence(rng).split()
    # The last sentence is cut, and closed.
    return " ".join(written[:words]).rstrip(".,") + "." if words else ""


def _sentence(rng: np.random.Generator) -> str:
    when, who, did, where = (str(rng.choice(part)) for part in (WHEN, WHO, DID, WHERE))
    return f"{when}, {who} {did} {where}."
