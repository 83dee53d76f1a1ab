"""Results of the audit's checks: passed or not, measured values, and a description of a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GUARANTEE_CHECKS = frozenset(
    {"distribution", "tokens", "grammar", "generator", "model", "embedded"}
)
"""Checks of a method's guarantee. A method that fails one is BROKEN. A method that fails another
check is FAULTY: its output is right, but it wastes or misreports work."""


DECLARATIONS = "declarations"
"""Check of the declarations of a method's class. A failure gives MISDECLARED, not FAULTY."""


COMPARISONS: Mapping[str, tuple[str, str]] = {
    "declarations": ("what the code of the method did", "no contradiction to its class attributes"),
    "distribution": (
        "distribution of the first tokens, and of tokens late in a draft or text, under rejection"
        " and block, over all random outcomes",
        "the target's distribution; total variation at most 1e-9",
    ),
    "acceptance": (
        "mean number of accepted draft tokens, over the same outcomes",
        "sum min(p, q); at most 1e-9 tokens off",
    ),
    "tokens": ("greedy and coupled outputs", "the tokens that the table determines"),
    "grammar": (
        "greedy and coupled outputs under a grammar",
        "the tokens that the table and the grammar determine",
    ),
    "order": (
        "outputs and steps when prompts are decoded one after another, in two orders",
        "equal to those of each prompt alone",
    ),
    "batch": ("outputs and steps in a batch", "equal to those of each sequence alone"),
    "states": ("rows of all model states, after every step", "the tokens of the text"),
    "counters": ("numbers that a step reports", "what was scored, verified and committed"),
    "clock": (
        "time, forwards and worker threads or processes that the session reports",
        "equal to those that the audit observes from outside",
    ),
    "recurrent": ("outputs and states of recurrent models", "those that the table determines"),
    "twin draft": (
        "number of accepted tokens if the draft model equals the target",
        "all tokens; under rejection sum min(p, q), at most 6 standard deviations off",
    ),
    "mixed draft": (
        "number of accepted tokens if some draft tokens are right, after accepted and rejected"
        " drafts",
        "equal to the number of right tokens",
    ),
    "useless draft": ("number of accepted tokens if every draft token is wrong", "none"),
    "repeating text": ("number of accepted tokens if the text repeats itself", "all tokens"),
    "generator": (
        "4,000 sampled tokens of a Markov chain; outputs of another repeat, seed and prompt",
        "the chain's distribution, p-value at least 1e-6; outputs that differ",
    ),
    "model": ("outputs of a tiny Llama", "equal to those of transformers"),
    "caches": (
        "cached rows of a tiny Llama",
        "those of one forward over the whole text; at most 1e-5 of the largest number off",
    ),
    "embedded": (
        "800 sampled tokens of the embedded models",
        "the target's distribution, p-value at least 1e-6 in two tests",
    ),
}
"""Measured and expected values of each check, by the name of its finding."""


def format_distinct(a: float, b: float) -> tuple[str, str]:
    """Return two numbers as text, with as many decimals as needed to distinguish them (at least
    4).
    """
    for decimals in range(4, 18):
        both = f"{a:.{decimals}f}", f"{b:.{decimals}f}"
        if both[0] != both[1]:
            break
    return both


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that a check found.

    what: description of the problem.
    where: case in which it was found.
    look: code of the method to look at first.
    """

    what: str
    where: str
    look: str

    def __str__(self) -> str:
        return f"  what   {self.what}\n  where  {self.where}\n  look   {self.look}"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        check: name of the check.
        passed: True if no problem was found.
        figure: measured values and numbers of cases, by name.
        problem: the worst case, if not passed.
        crashed: True if the method raised an error, other than a `MethodFault` of the engine.
        shown: False if the check failed only because it could test no case.
        seconds: time of the check.
        left_out: reason why cases were left out; empty if none was.
    """

    check: str
    passed: bool
    figure: Mapping[str, float]
    problem: Problem | None = None
    crashed: bool = False
    shown: bool = True
    seconds: float = field(default=0.0, compare=False)
    left_out: str = ""

    @property
    def checks_guarantee(self) -> bool:
        """True if the check concerns the method's guarantee."""
        return self.check in GUARANTEE_CHECKS
