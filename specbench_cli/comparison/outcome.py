"""What became of each method between two sides, and whether that closes the gate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from specbench_cli.comparison.cell import RowKey
from specbench_cli.config.problems import did_you_mean
from specbench_cli.errors import UsageError

Outcome = Literal["broken", "changed-output", "mat", "slower", "missing", "faster", "new", "same"]
"""Worst first."""

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
FAIL_ON: tuple[Outcome, ...] = ("broken", "changed-output", "mat", "slower")
NONE = "none"
"""In place of outcomes that close the gate: nothing does."""

Rule = Literal["exact", "verdict", "ids only", "nothing"]
"""By which the deterministic gate judges a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonFinding:
    """One thing found of a row. where: prompts and turns, first ones first ("mini/qa/3 turn 1")."""

    outcome: Outcome
    message: str
    locations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeChange:
    """A time's ratio, NEW over BASE (above 1: slower), with its simultaneous interval; None where
    its ends are no figures (`stats.bootstrap.MAX_INTERVAL_RATIO`).

    figure: "decode", "draft forward", "verify forward", "host" or "vanilla / hf:vanilla"; relative
    to what `comparison.timing` says. significant: the interval excludes 1. detects: the smallest
    slowdown that this comparison would have found with 80% power, as a ratio. relative: whether it
    is relative to a time of the same process; else it is a time as it is.
    """

    figure: str
    ratio: float
    low: float | None
    high: float | None
    significant: bool
    detects: float | None = None
    relative: bool = True

    @property
    def percent(self) -> str:
        """Return the change with its interval: `+8.1% [+5.0%, +11.2%]`."""
        shift = f"{self.ratio - 1:+.1%}"
        if self.low is None or self.high is None:
            return shift
        return f"{shift} [{self.low - 1:+.1%}, {self.high - 1:+.1%}]"

    def __str__(self) -> str:
        return f"{self.figure} {self.percent}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOutcome:
    """A row's outcome: its worst finding's, "same" without any.

    pairs: cells compared. why: of the rule. mat: (BASE, NEW).
    """

    key: RowKey
    outcome: Outcome
    rule: Rule
    rule_reason: str
    pairs: int
    findings: tuple[ComparisonFinding, ...] = ()
    mat: tuple[float | None, float | None] = (None, None)
    changes: tuple[TimeChange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A comparison of two sides.

    not_compared: what could not be, and why, a sentence each. timing: whether and how the timing
    gate was applied, in one sentence. tolerance: of the timing gate, 0.05 for 5%.
    """

    base: str
    new: str
    rows: tuple[RowOutcome, ...]
    not_compared: tuple[str, ...] = ()
    timing: str = ""
    tolerance: float = 0.05
    fail_on: tuple[Outcome, ...] = FAIL_ON
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def failed_rows(self) -> tuple[RowOutcome, ...]:
        """The rows that close the gate."""
        return tuple(
            row for row in self.rows if any(found.outcome in self.fail_on for found in row.findings)
        )


def worst_outcome(findings: Iterable[ComparisonFinding]) -> Outcome:
    """The worst outcome of a row's findings; "same" without any."""
    return min((found.outcome for found in findings), key=OUTCOMES.index, default="same")


def parse_fail_on(words: str) -> tuple[Outcome, ...]:
    """The outcomes that close the gate, of a list with commas; none for "none".

    Raises:
        UsageError: a word is no outcome, or "same"; or nothing is named.
    """
    names = [word.strip() for word in words.split(",") if word.strip()]
    if names == [NONE]:
        return ()
    known = [outcome for outcome in OUTCOMES if outcome != "same"]
    for word in names:
        if word not in known:
            raise UsageError(
                f"--fail-on {word!r} is none of {', '.join(known)}, and not {NONE} alone"
                f"{did_you_mean(word, known)}",
                hint=f"--fail-on {','.join(FAIL_ON)}",
            )
    if not names:
        raise UsageError(
            f"--fail-on names nothing; there are {', '.join(known)}, or {NONE} alone",
            hint=f"--fail-on {','.join(FAIL_ON)}",
        )
    return tuple(outcome for outcome in known if outcome in names)


def parse_tolerance(tolerance: str) -> float:
    """Return 0.05 for `5%` or `0.05`. Raise UsageError if the text is not a share from 0 to 1."""
    number, percent = tolerance.strip().removesuffix("%"), tolerance.strip().endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise UsageError(
            f"--tolerance {tolerance!r} is no share from 0 to 1: 5% or 0.05",
            "specbench compare BASE NEW --tolerance 5%",
        )
    return share
