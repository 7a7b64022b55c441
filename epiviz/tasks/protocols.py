"""How the papers asked and sampled: prompts, limits, temperatures and budgets, as presets.

Sources: EpiKV (arXiv 2606.26472), section 5, tables 3 and 4, and its public code; VaSE (arXiv 2606.03928), its tables
and the scripts of its public code.
"""

from __future__ import annotations

from dataclasses import dataclass, field

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
BOXED_SHORT = "Put your final answer within \\boxed{}."
# The papers' wording is in a file that is not public; this asks for the same.
BOXED_LETTER = "Please reason step by step, and put the letter of your choice within \\boxed{}."


@dataclass(frozen=True)
class Protocol:
    """What a paper did on one task.

    Attributes
    ----------
    paper, task : str
    models : tuple of str
        Hub ids.
    n_problems, samples : int
        The first so many problems of the set, each so many times.
    max_new_tokens, max_tokens : int or None
        Where a text is cut: tokens written, or prompt and text together; one of the two is given.
    temperature, top_p, top_k : float, float, int
        0, 1 and 0: greedy.
    budgets : tuple of int
        Slots, as the paper counts them.
    system, instruction : str
        A system message, and what is put after the question; ``joint`` stands between.
    filters : dict
        Which problems of the set, as :func:`epiviz.tasks.load` takes it.

    Examples
    --------
    >>> protocol("vase", "aime25").sampling
    {'temperature': 0.6, 'top_p': 0.95, 'top_k': 0}
    >>> protocol("vase", "aime25").new_tokens(prompt_tokens=768)
    32000
    """

    paper: str
    task: str
    models: tuple[str, ...]
    n_problems: int
    samples: int = 1
    max_new_tokens: int | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    budgets: tuple[int, ...] = ()
    system: str = ""
    instruction: str = ""
    joint: str = "\n"
    filters: dict = field(default_factory=dict)

    @property
    def sampling(self) -> dict[str, float]:
        """The sampling as arguments of :func:`epiviz.generate`."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}

    def new_tokens(self, prompt_tokens: int) -> int:
        """Return how many tokens may be written after a prompt of so many.

        Raises
        ------
        ValueError
            The prompt alone is as long as prompt and text together may be.
        """
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if prompt_tokens >= self.max_tokens:
            raise ValueError(
                f"the prompt has {prompt_tokens} tokens, and {self.paper} on {self.task} allows {self.max_tokens} for "
                "prompt and text together"
            )
        return self.max_tokens - prompt_tokens

    def prompt(self, question: str) -> str | list[dict[str, str]]:
        """Return a question as the paper asked it."""
        asked = question + self.joint + self.instruction if self.instruction else question
        if not self.system:
            return asked
        return [{"role": "system", "content": self.system}, {"role": "user", "content": asked}]


def _epikv(task: str, **settings) -> Protocol:
    model = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
    return Protocol("epikv", task, (model,), system=BOXED, **settings)


def _vase(task: str, samples: int, budgets: tuple[int, ...], max_tokens: int = 32768, **settings) -> Protocol:
    models = ("Qwen/Qwen3-4B",) if task in ("gsm8k", "livecodebench") else ("Qwen/Qwen3-4B", "Qwen/Qwen3-14B")
    sampled = {"temperature": 0.6, "top_p": 0.95}  # the models' top_k of 20 was not applied
    return Protocol(
        "vase", task, models, samples=samples, budgets=budgets, max_tokens=max_tokens, **sampled, **settings
    )


_ALL = (
    _epikv("math500", n_problems=100, max_new_tokens=8192, budgets=(512, 1024, 2048, 4096)),
    _epikv("aime24", n_problems=30, max_new_tokens=16384, budgets=(512, 1024, 2048, 4096, 8192)),
    _vase("aime25", 16, (4096,), n_problems=30, instruction=BOXED),
    _vase("aime26", 16, (2048, 4096, 6144), n_problems=30, instruction=BOXED),
    _vase("hmmt25", 16, (2048, 4096, 6144), n_problems=60, instruction=BOXED),
    _vase("math500", 8, (1024,), n_problems=500, instruction=BOXED),
    _vase("gpqa-diamond", 8, (2048, 4096), n_problems=198, instruction=BOXED_LETTER),
    _vase("livecodebench", 8, (2048,), n_problems=383, filters={"difficulty": "medium"}),
    _vase("gsm8k", 4, (512,), 4096, n_problems=500, instruction=BOXED_SHORT, joint=" "),
)
PROTOCOLS = {(one.paper, one.task): one for one in _ALL}


def protocol(paper: str, task: str) -> Protocol:
    """Return what a paper did on a task.

    Parameters
    ----------
    paper : {"epikv", "vase"}
    task : str

    Raises
    ------
    ValueError
        The paper published nothing on this task.
    """
    if (paper, task) not in PROTOCOLS:
        known = ", ".join(f"{one.paper} on {one.task}" for one in _ALL)
        raise ValueError(f"there is no published protocol of {paper!r} on {task!r}; there is {known}")
    return PROTOCOLS[paper, task]


def plain(task: str) -> Protocol:
    """Return how a task is asked when no paper is followed: one user message with the usual instruction."""
    instruction = {"gpqa-diamond": BOXED_LETTER, "livecodebench": ""}.get(task, BOXED)
    return Protocol("", task, (), n_problems=0, instruction=instruction)
