"""Comparison of two sides, BASE and NEW: scope, findings, and the outcome of each row.

A row is a method on a task. Findings come from the deterministic gate (token ids and counters) and
from the timing gate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from specbench_cli.comparison import deterministic, timing
from specbench_cli.comparison.compared_output import RowKey
from specbench_cli.comparison.outcome import (
    Comparison,
    ComparisonFinding,
    Outcome,
    RowOutcome,
    TimeChange,
    worst_outcome,
)
from specbench_cli.comparison.processes import collect_processes
from specbench_cli.comparison.scope import Scope, determine_scope
from specbench_cli.comparison.side import Side
from specbench_cli.errors import UsageError
from specbench_cli.stats.regression import LEVEL


def compare(base: Side, new: Side, *, tolerance: float, fail_on: Sequence[Outcome]) -> Comparison:
    """Compare BASE with NEW.

    Args:
        base, new: the two sides.
        tolerance: allowed slowdown, 0.05 for 5%.
        fail_on: outcomes with which the comparison fails.

    Raises:
        UsageError: nothing in the two sides can be compared.
    """
    scope = determine_scope(base, new)
    changes: Mapping[RowKey, tuple[TimeChange, ...]] = {}
    untimed: tuple[str, ...] = ()
    processes = collect_processes(base, new)
    if scope.timing is None:
        changes = timing.estimate_changes(scope, processes, tolerance)
        untimed = (*base.left_out, *new.left_out, *timing.explain_unjudged(scope, processes))
    rows = (
        *_compare_rows(scope, changes, tolerance),
        *_missing_rows(scope),
        *_added_rows(scope, new),
    )
    judged = changes or any(rule != "nothing" for rule, _ in scope.rules.values())
    if not judged and not any(row.outcome == "broken" for row in rows):
        _raise_nothing_comparable(base, new, scope)
    return Comparison(
        base=base.name,
        new=new.name,
        rows=rows,
        not_compared=(*scope.not_compared, *untimed),
        timing=_describe_timing(scope, tolerance, processes.pairs),
        tolerance=tolerance,
        fail_on=tuple(fail_on),
        facts={"base": _facts(base), "new": _facts(new)},
    )


def _compare_rows(
    scope: Scope, changes: Mapping[RowKey, tuple[TimeChange, ...]], tolerance: float
) -> Iterator[RowOutcome]:
    """Yield the outcomes of the rows that both sides have."""
    counted = deterministic.compare_outputs(scope)
    for row, pairs in scope.pairs.items():
        times = changes.get(row, ())
        found = [*counted[row], *timing.find_significant_changes(times, tolerance)]
        if cause := scope.causes.get(row.label):
            found = [
                replace(each, message=f"{each.message}; likely cause: {cause}") for each in found
            ]
        rule, why = scope.rules[row]
        yield RowOutcome(
            key=row,
            outcome=worst_outcome(found),
            rule=rule,
            rule_reason=why,
            pairs=len(pairs),
            findings=tuple(found),
            mat=deterministic.mean_accepted_tokens(pairs),
            changes=times,
        )


def _missing_rows(scope: Scope) -> Iterator[RowOutcome]:
    for row in scope.missing:
        yield _unpaired_row(
            row, "only BASE has it", [ComparisonFinding(outcome="missing", message="not in NEW")]
        )


def _added_rows(scope: Scope, new: Side) -> Iterator[RowOutcome]:
    """Yield the outcomes of rows that only NEW has.

    Broken outputs of these rows are findings, too.
    """
    for row in scope.new:
        outputs = [output for output in new.outputs.values() if output.row == row]
        bad = [output for output in outputs if deterministic.is_bad(output)]
        found = [ComparisonFinding(outcome="new", message="not in BASE")]
        if bad:
            found.insert(0, deterministic.make_broken_finding(bad, len(outputs)))
        yield _unpaired_row(row, "only NEW has it", found)


def _unpaired_row(row: RowKey, why: str, found: Sequence[ComparisonFinding]) -> RowOutcome:
    return RowOutcome(
        key=row,
        outcome=worst_outcome(found),
        rule="nothing",
        rule_reason=why,
        pairs=0,
        findings=tuple(found),
    )


def _describe_timing(scope: Scope, tolerance: float, turns: int) -> str:
    if scope.timing is not None:
        return f"skipped: {scope.timing}"
    least = f"{100 * tolerance:.3g}%"
    among = f" to {turns} pairs of runs that took turns" if turns else ""
    return (
        f"applied{among}: a difference counts that is significant ({100 * LEVEL:.3g}%, all figures"
        f" of all rows at once) and above {least}"
    )


def _facts(side: Side) -> dict[str, object]:
    return {"created_utc": side.created_utc, "noisy": side.noisy, **side.facts}


def _raise_nothing_comparable(base: Side, new: Side, scope: Scope) -> None:
    """Raise UsageError. An empty comparison must not look as if nothing changed."""
    reasons = dict.fromkeys((*scope.not_compared, *(why for _, why in scope.rules.values())))
    lines = "".join(f"\n  {reason}" for reason in reasons)
    raise UsageError(
        f"nothing of {base.name} and {new.name} can be compared"
        f"{':' + lines if lines else ': they share no output'}",
        hint="specbench run with BASE's target, tasks, seed and settings, then compare again;"
        " specbench list runs",
    )
