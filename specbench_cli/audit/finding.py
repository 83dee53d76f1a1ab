"""What a check found: passed or not, its figures, and of a problem what, where and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GUARANTEE_CHECKS = frozenset(
    {"distribution", "tokens", "grammar", "generator", "model", "embedded"}
)
"""Checks of what a method promises of its output: one that fails makes it BROKEN. The others leave
the output right: a method that fails one of them is FAULTY, it wastes work or misreports it."""


DECLARATIONS = "declarations"
"""The check of what a method's class says: one that fails is named before a method is FAULTY."""


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
    """Return two numbers as text, with as many decimals as needed to distinguish them (min. 4)."""
    for decimals in range(4, 18):
        both = f"{a:.{decimals}f}", f"{b:.{decimals}f}"
        if both[0] != both[1]:
            break
    return both


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, in which case it was found, and which code to look at first."""

    what: str
    where: str
    look: str

    def __str__(self) -> str:
        return f"  what   {self.what}\n  where  {self.where}\n  look   {self.look}"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        check: the check's name.
        passed: whether everything held.
        figure: what was measured, by name, and over how many cases.
        problem: the worst case, if not passed.
        crashed: whether the method raised an error that is none of the engine's refusals.
        shown: False of a check that did not pass because it got to see nothing: it has found no
            fault, and no claim may rest on it.
        seconds: what the check took.
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
        """Whether the output itself is at stake."""
        return self.check in GUARANTEE_CHECKS
