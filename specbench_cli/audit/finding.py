"""What a check found: passed or not, its figures, and of a problem what, where and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CLAIMS = frozenset({"law", "tokens", "grammar", "generator", "model", "embedded"})
"""Checks of what a method promises of its output: one that fails makes it BROKEN. The others leave
the output right: a method that fails one of them is FAULTY, it wastes work or misreports it."""


DECLARATIONS = "declarations"
"""The check of what a method's class says: one that fails is named before a method is FAULTY."""


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
    """

    check: str
    passed: bool
    figure: Mapping[str, float]
    problem: Problem | None = None
    crashed: bool = False
    shown: bool = True
    seconds: float = field(default=0.0, compare=False)

    @property
    def is_claim(self) -> bool:
        """Whether the output itself is at stake."""
        return self.check in CLAIMS
