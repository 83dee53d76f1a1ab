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
    "declarations": ("what the class declares with what its code did", "no contradiction"),
    "distribution": (
        "the distribution of the first tokens, late levels and late tokens under rejection and"
        " block verification, over all outcomes, with the target's",
        "total variation 1e-9",
    ),
    "acceptance": (
        "accepted draft tokens with sum min(p, q), over the same outcomes",
        "1e-9 tokens",
    ),
    "tokens": ("greedy and coupled outputs with the table's own", "equal"),
    "grammar": ("greedy and coupled outputs under a grammar with the table's own", "equal"),
    "order": ("outputs and steps of a pass with those of each prompt alone", "equal"),
    "batch": ("outputs and steps in a batch with those of each sequence alone", "equal"),
    "states": ("the rows of all states with the text, after every step", "equal"),
    "counters": ("what a step reports with what was scored, verified and committed", "equal"),
    "clock": ("clock, forwards and helpers of the session with those seen from outside", "equal"),
    "recurrent": ("outputs and states of recurrent models with the table's own", "equal"),
    "twin draft": (
        "accepted tokens with all, or with sum min(p, q), where the draft is the target",
        "all; 6 standard deviations",
    ),
    "mixed draft": (
        "accepted tokens after accepted and rejected drafts with the draft's correct tokens",
        "equal",
    ),
    "useless draft": ("accepted tokens with none, where the draft cannot be right", "none"),
    "repeating text": ("accepted tokens with all, where a text repeats itself", "all"),
    "generator": (
        "4,000 sampled tokens of a Markov chain with its distribution; outputs of another pass,"
        " seed and prompt with the first one",
        "p = 1e-6; not equal",
    ),
    "model": ("outputs of a tiny Llama with transformers'", "equal"),
    "caches": (
        "cached rows of a tiny Llama with those of one forward",
        "1e-5 of the largest number",
    ),
    "embedded": (
        "800 sampled tokens of the shipped pair with the target's distribution, in two orders",
        "p = 1e-6 each",
    ),
}
"""Comparison and bound of each check, by the name of its finding."""


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
