"""Two sides put together: what can be compared, what both gates found, what became of each row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from specbench_cli.comparison import deterministic, timing
from specbench_cli.comparison.cell import RowKey
from specbench_cli.comparison.outcome import (
    Change,
    Comparison,
    Finding,
    Outcome,
    RowOutcome,
    worst,
)
from specbench_cli.comparison.processes import processes
from specbench_cli.comparison.scope import Scope, scope
from specbench_cli.comparison.side import Side
from specbench_cli.errors import UsageError
from specbench_cli.stats.regression import LEVEL


def compare(base: Side, new: Side, *, tolerance: float, fail_on: Sequence[Outcome]) -> Comparison:
    """What changed from BASE to NEW.

    Args:
        tolerance: the slowdown that is let pass, 0.05 for 5%.
        fail_on: the outcomes that close the gate.

    Raises:
        UsageError: the sides have nothing in common that could be judged.
    """
    at = scope(base, new)
    changes: Mapping[RowKey, tuple[Change, ...]] = {}
    untimed: tuple[str, ...] = ()
    run = processes(base, new)
    if at.timing is None:
        changes = timing.changes(at, run, tolerance)
        untimed = (*base.left_out, *new.left_out, *timing.not_judged(at, run))
    rows = (*_compared(at, changes, tolerance), *_missing(at), *_added(at, new))
    judged = changes or any(rule != "nothing" for rule, _ in at.rules.values())
    if not judged and not any(row.outcome == "broken" for row in rows):
        _refuse(base, new, at)
    return Comparison(
        base=base.name,
        new=new.name,
        rows=rows,
        not_compared=(*at.not_compared, *untimed),
        timing=_timing(at, tolerance, run.pairs),
        tolerance=tolerance,
        fail_on=tuple(fail_on),
        facts={"base": _facts(base), "new": _facts(new)},
    )


def _compared(
    at: Scope, changes: Mapping[RowKey, tuple[Change, ...]], tolerance: float
) -> Iterator[RowOutcome]:
    """The rows that both sides have."""
    counted = deterministic.findings(at)
    for row, pairs in at.pairs.items():
        times = changes.get(row, ())
        found = [*counted[row], *timing.findings(times, tolerance)]
        if cause := at.causes.get(row.label):
            found = [replace(each, says=f"{each.says}; likely cause: {cause}") for each in found]
        rule, why = at.rules[row]
        yield RowOutcome(
            key=row,
            outcome=worst(found),
            rule=rule,
            why=why,
            pairs=len(pairs),
            findings=tuple(found),
            mat=deterministic.mats(pairs),
            changes=times,
        )


def _missing(at: Scope) -> Iterator[RowOutcome]:
    for row in at.missing:
        yield _alone(row, "only BASE has it", [Finding(outcome="missing", says="not in NEW")])


def _added(at: Scope, new: Side) -> Iterator[RowOutcome]:
    """Rows that NEW alone has: nothing to compare with, but broken is broken."""
    for row in at.new:
        cells = [cell for cell in new.cells.values() if cell.row == row]
        bad = [cell for cell in cells if deterministic.is_bad(cell)]
        found = [Finding(outcome="new", says="not in BASE")]
        if bad:
            found.insert(0, deterministic.broken(bad, len(cells)))
        yield _alone(row, "only NEW has it", found)


def _alone(row: RowKey, why: str, found: Sequence[Finding]) -> RowOutcome:
    return RowOutcome(
        key=row, outcome=worst(found), rule="nothing", why=why, pairs=0, findings=tuple(found)
    )


def _timing(at: Scope, tolerance: float, turns: int) -> str:
    if at.timing is not None:
        return f"skipped: {at.timing}"
    least = f"{100 * tolerance:.3g}%"
    among = f" to {turns} pairs of runs that took turns" if turns else ""
    return (
        f"applied{among}: a difference counts that is significant ({100 * LEVEL:.3g}%, all figures"
        f" of all rows at once) and above {least}"
    )


def _facts(side: Side) -> dict[str, object]:
    return {"created_utc": side.created_utc, "noisy": side.noisy, **side.facts}


def _refuse(base: Side, new: Side, at: Scope) -> None:
    """Raises UsageError: a comparison of nothing must not look like a pass."""
    reasons = dict.fromkeys((*at.not_compared, *(why for _, why in at.rules.values())))
    lines = "".join(f"\n  {reason}" for reason in reasons)
    raise UsageError(
        f"nothing of {base.name} and {new.name} can be compared"
        f"{':' + lines if lines else ': they share no output'}",
        hint="specbench run with BASE's target, tasks, seed and settings, then compare again;"
        " specbench list runs",
    )
