"""Outcome of each row (a method on a task) in a comparison, and whether the comparison fails."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from specbench_cli.comparison.compared_output import RowKey
from specbench_cli.config.problems import did_you_mean
from specbench_cli.errors import UsageError

Outcome = Literal["broken", "changed-output", "mat", "slower", "missing", "faster", "new", "same"]
"""Outcome of a row (the outputs of one method for one task); the worst is first."""

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
FAIL_ON: tuple[Outcome, ...] = ("broken", "changed-output", "mat", "slower")
NONE = "none"
"""Value of --fail-on with which no outcome fails the gate."""

Rule = Literal["exact", "verdict", "ids only", "nothing"]
"""Rule of the deterministic gate for a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonFinding:
    """A difference that the comparison found in a row (a method on a task).

    message: what changed.
    locations: prompts and turns in order ("mini/qa/3 turn 1").
    """

    outcome: Outcome
    message: str
    locations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeChange:
    """Change of a time: the ratio NEW / BASE (above 1: slower), with a simultaneous interval.

    figure: compared time: "decode", "draft forward", "verify forward", "host" or "vanilla /
        hf:vanilla". `comparison.timing` defines these.
    low, high: ends of the interval; None if it is too wide (`stats.bootstrap.MAX_INTERVAL_RATIO`).
    significant: True if the interval excludes 1.
    detects: smallest slowdown, as a ratio, that this comparison finds with 80% power.
    relative: True if the time is divided by another time of the same process.
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
    """Outcome of a row (a method on a task): the worst of its findings, or "same" without findings.

    rule: what must be equal in BASE and NEW (`comparison.scope`).
    rule_reason: reason why this rule applies.
    pairs: number of compared outputs.
    mat: mean accepted tokens of BASE and of NEW.
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
    """Comparison of two sides.

    not_compared: sentences on what could not be compared, and why.
    timing: sentence on whether and how the timing gate was applied.
    tolerance: allowed slowdown, 0.05 for 5%.
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
        """Rows that fail the comparison, because a finding's outcome is in `fail_on`."""
        return tuple(
            row for row in self.rows if any(found.outcome in self.fail_on for found in row.findings)
        )


def worst_outcome(findings: Iterable[ComparisonFinding]) -> Outcome:
    """Return the worst outcome of findings, or "same" without findings."""
    return min((found.outcome for found in findings), key=OUTCOMES.index, default="same")


def parse_fail_on(words: str) -> tuple[Outcome, ...]:
    """Return the outcomes that fail the gate, from a comma-separated list; empty for "none".

    Raises:
        UsageError: a word is not an outcome or is "same", or the list is empty.
    """
    names = [word.strip() for word in words.split(",") if word.strip()]
    if names == [NONE]:
        return ()
    known = [outcome for outcome in OUTCOMES if outcome != "same"]
    for word in names:
        if word not in known:
            raise UsageError(
                f"--fail-on {word!r} must be some of {', '.join(known)}, or only {NONE}"
                f"{did_you_mean(word, known)}",
                hint=f"--fail-on {','.join(FAIL_ON)}",
            )
    if not names:
        raise UsageError(
            f"--fail-on is empty: use some of {', '.join(known)}, or only {NONE}",
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
            f"--tolerance {tolerance!r} must be a share from 0 to 1, such as 5% or 0.05",
            "specbench compare BASE NEW --tolerance 5%",
        )
    return share
