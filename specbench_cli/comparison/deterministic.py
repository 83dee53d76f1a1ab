"""The deterministic gate: ids, verdicts and counters, which no noise can change.

A row's rule says how much must be the same. `exact`: ids and every counter. `verdict`: NEW's own
verdicts, and the counters of all but a hundredth of the prompts (one at least): on another machine
a near-tie falls the other way now and then. `ids only`: ids on the same machine and versions, but
for near-ties, since steps that depend on timing read the target at other widths; elsewhere NEW's
own verdicts. Whatever the rule, an output that is an error or a mismatch in NEW alone is broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from specbench_cli.comparison.cell import Cell, Counters, RowKey
from specbench_cli.comparison.outcome import Finding, Rule

if TYPE_CHECKING:
    from specbench_cli.comparison.scope import Scope

Pair = tuple[Cell, Cell]
"""BASE's and NEW's."""

STRAYS = 0.01
"""Share of a row's prompts whose counters may differ on another machine; one always may."""

_WORDS = {
    "n_tokens": "tokens",
    "committed": "committed tokens",
    "steps": "steps",
    "levels": "drafted levels",
    "nodes": "nodes",
    "tested": "tested levels",
    "accepted": "accepted levels",
    "target_forwards": "target forwards",
    "draft_forwards": "draft forwards",
}
_DIGITS = range(2, 7)
"""Decimals of a MAT: as few as tell two apart."""


def findings(scope: Scope) -> Mapping[RowKey, tuple[Finding, ...]]:
    """What changed in each row that both sides have; nothing of a row where nothing did."""
    return {
        row: tuple(_of_row(pairs, scope.rules[row][0], scope.elsewhere is None))
        for row, pairs in scope.pairs.items()
    }


def broken(cells: Sequence[Cell], of: int) -> Finding:
    """Outputs of NEW, at least one, that are errors or mismatches. of: how many there are."""
    kinds = Counter("mismatch" if cell.error is None else f"error: {cell.error}" for cell in cells)
    told = "; ".join(f"{count} {kind}" for kind, count in kinds.items())
    return Finding(
        outcome="broken",
        says=f"{_of(len(cells), of, 'output')} broken in NEW alone: {told}",
        where=_places(cells),
    )


def is_bad(cell: Cell) -> bool:
    """Whether an output is an error or a mismatch."""
    return cell.error is not None or cell.verdict == "mismatch"


def mats(pairs: Iterable[Pair]) -> tuple[float | None, float | None]:
    """The mean accepted tokens of BASE and NEW, over the outputs that neither failed at."""
    sums = _sums([pair for pair in pairs if not _failed(pair)])
    return (None, None) if sums is None else (sums[0].mat, sums[1].mat)


def _of_row(pairs: Sequence[Pair], rule: Rule, same_machine: bool) -> Iterable[Finding]:
    spoilt = [new for base, new in pairs if is_bad(new) and not is_bad(base)]
    if spoilt:
        yield broken(spoilt, len(pairs))
    rest = [(base, new) for base, new in pairs if not is_bad(new) or is_bad(base)]
    if rule == "exact" or (rule == "ids only" and same_machine):
        changed = [pair for pair in rest if not _same_output(pair)]
        if rule == "ids only":
            changed = [pair for pair in changed if not any(c.verdict == "near-tie" for c in pair)]
        if changed:
            yield _changed_output(changed, len(pairs))
    whole = [pair for pair in rest if not _failed(pair)]
    if rule == "exact":
        # Another output has other counters too, which say nothing more.
        same = [pair for pair in whole if _same_output(pair)]
        recounted = [pair for pair in same if _recounted(pair)]
        if recounted:
            told = _of(len(recounted), len(pairs), "output")
            yield _mat(f"counters of {told} differ", recounted, same)
    elif rule == "verdict":
        recounted = [pair for pair in whole if _recounted(pair)]
        prompts = len({base.key.prompt_id for base, _ in pairs})
        strays, allowed = len({base.key.prompt_id for base, _ in recounted}), STRAYS * prompts
        if strays > max(allowed, 1):
            told = (
                f"counters at {_of(strays, prompts, 'prompt')} differ, {max(int(allowed), 1)} may"
            )
            yield _mat(told, recounted, whole)


def _failed(pair: Pair) -> bool:
    return any(cell.error is not None for cell in pair)


def _same_output(pair: Pair) -> bool:
    base, new = pair
    return (base.ids, base.finish) == (new.ids, new.finish)


def _recounted(pair: Pair) -> bool:
    base, new = pair
    return base.counters != new.counters


def _changed_output(pairs: Sequence[Pair], of: int) -> Finding:
    mended = sum(is_bad(base) and not is_bad(new) for base, new in pairs)
    told = f", {mended} of them errors or mismatches in BASE" if mended else ""
    return Finding(
        outcome="changed-output",
        says=f"{_of(len(pairs), of, 'output')} changed{told}",
        where=_places(new for _, new in pairs),
    )


def _mat(told: str, recounted: Sequence[Pair], counted: Sequence[Pair]) -> Finding:
    """Counters that differ. counted: the outputs whose sums are given, those that differ among
    them."""
    figures = _figures(counted)
    if not figures:
        first = recounted[0]
        figures = [f"their sums do not, at {_place(first[1])} {'; '.join(_figures([first]))}"]
    return Finding(
        outcome="mat",
        says=f"{told}: {'; '.join(figures)}",
        where=_places(new for _, new in recounted),
    )


def _figures(pairs: Sequence[Pair]) -> list[str]:
    """What the sums of counters changed from and to, MAT first."""
    sums = _sums(pairs)
    if sums is None:
        return []
    base, new = sums
    told = [f"MAT {_mat_of(base, new)}"] if base.mat != new.mat else []
    after = asdict(new)
    for name, was in asdict(base).items():
        if was != after[name]:
            told.append(f"{_WORDS[name]} {_number(was)} -> {_number(after[name])}")
    return told


def _sums(pairs: Sequence[Pair]) -> tuple[Counters, Counters] | None:
    if not pairs:
        return None
    base, new = zip(*((base.counters, new.counters) for base, new in pairs), strict=True)
    return Counters.summed(base), Counters.summed(new)


def _mat_of(base: Counters, new: Counters) -> str:
    for digits in _DIGITS:
        told = ["none" if mat is None else f"{mat:.{digits}f}" for mat in (base.mat, new.mat)]
        if told[0] != told[1]:
            break
    return " -> ".join(told)


def _number(value: int | None) -> str:
    return "none" if value is None else f"{value:,}"


def _of(count: int, of: int, what: str) -> str:
    return f"{count} of {of} {what}{'' if of == 1 else 's'}"


def _place(cell: Cell) -> str:
    return f"{cell.key.prompt_id} turn {cell.key.turn}"


def _places(cells: Iterable[Cell]) -> tuple[str, ...]:
    """Each once, whatever the passes."""
    return tuple(dict.fromkeys(map(_place, cells)))
