"""How a method's figures went over runs, in order of time, and where they changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specbench_cli.comparison import reading
from specbench_cli.comparison.baselines import baseline
from specbench_cli.comparison.cell import ComparedOutput, PairKey, RowKey
from specbench_cli.comparison.deterministic import is_bad
from specbench_cli.comparison.side import Side, describe_changed_params
from specbench_cli.errors import UsageError
from specbench_cli.stats import changes
from specbench_cli.store.run_dir import RUNS
from specbench_cli.store.schema import BASELINE
from specbench_cli.summary.speedups import MAX_UNTIMED

SPEEDUP, MAT, ACCEPTANCE, BAD = "decode speedup", "MAT", "acceptance", "bad outputs"
FIGURES = (SPEEDUP, MAT, ACCEPTANCE, BAD)
"""Decode speedup: over vanilla of the same run. Acceptance: levels accepted / drafted. Bad outputs:
how many failed or are no near-tie of vanilla's."""
FALSE_ALARMS = 0.05
"""The chance of any false change point in all noisy series together."""
_PROGRAM = frozenset({"specbench", "commit"})
"""Facts that may differ: trends are over them."""


@dataclass(frozen=True, slots=True)
class TrendRun:
    """A run or baseline. commit: of the program, its first digits, null where unknown."""

    name: str
    created_utc: str
    commit: str | None


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """A change of a figure.

    last, first: the runs before and after it, as indices of `Trends.runs`. before, after: levels
    (medians). p: of the noisy figures; 0 where every difference is a change. params: parameters of
    the row that changed with it, in words.
    """

    last: int
    first: int
    before: float
    after: float
    p: float
    params: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendSeries:
    """A figure of a row over the runs, null where a run does not have it.

    noisy: whether equal programs may differ in it; where not, every difference is a change.
    """

    key: RowKey
    figure: str
    values: tuple[float | None, ...]
    noisy: bool
    changes: tuple[ChangePoint, ...] = ()

    @property
    def known_values(self) -> list[float]:
        """The values that there are."""
        return [value for value in self.values if value is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trends:
    """Runs in order of time, and every figure of every row over them.

    left_out: runs that do not belong with the newest, and times that were not used; a sentence
    each. level: of the test of one series.
    """

    runs: tuple[TrendRun, ...]
    series: tuple[TrendSeries, ...]
    left_out: tuple[str, ...]
    level: float


def load_trends(sources: Sequence[str]) -> Trends:
    """Trends over what the arguments of `specbench compare --over-time` name; without any, over all
    runs and baselines.

    Raises:
        UsageError: there is no such thing, or nothing but one run belongs together.
    """
    if sources:
        return find_trends([reading.load_side(name) for name in sources])
    sides, unreadable = [], []
    for path in _find_sources():
        try:
            sides.append(reading.load_side(str(path)))
        except UsageError as error:
            unreadable.append(f"{path.name}: {error}")
    return find_trends(sides, unreadable)


def find_trends(sides: Sequence[Side], left_out: Sequence[str] = ()) -> Trends:
    """The trends of the sides that belong with the newest one.

    Args:
        left_out: what is known to be left out already.

    Raises:
        UsageError: fewer than two belong together.
    """
    compatible, excluded = _select_compatible(sides)
    if len(compatible) < 2:
        raise UsageError(
            "a trend needs two runs that belong together"
            + "".join(f"\n  {line}" for line in (*left_out, *excluded)),
            hint="specbench list runs; specbench compare --over-time RUN RUN",
        )
    noisy = [
        f"{side.name} is labelled noisy: its times are left out"
        for side in compatible
        if side.noisy
    ]
    found = [
        (
            key,
            figure,
            _is_noisy(figure, key.label, compatible),
            [value(side, key) for side in compatible],
        )
        for key in _list_rows(compatible)
        for figure, value in _VALUES.items()
        if figure != SPEEDUP or key.label != BASELINE
    ]
    found = [entry for entry in found if any(value is not None for value in entry[3])]
    level = FALSE_ALARMS / max(1, sum(is_noisy for _, _, is_noisy, _ in found))
    return Trends(
        runs=tuple(TrendRun(s.name, s.created_utc, s.facts.get("commit")) for s in compatible),
        series=tuple(
            TrendSeries(
                key=key,
                figure=figure,
                values=tuple(values),
                noisy=is_noisy,
                changes=_find_changes(key.label, values, is_noisy, level, compatible),
            )
            for key, figure, is_noisy, values in found
        ),
        left_out=(*left_out, *excluded, *noisy),
        level=level,
    )


def _find_sources() -> list[Path]:
    """Every run's folder and every baseline's file."""
    return [
        *(manifest.parent for manifest in sorted(RUNS.glob("*/manifest.json"))),
        *sorted(baseline.ROOT.glob("*/*.json")),
    ]


def _select_compatible(sides: Sequence[Side]) -> tuple[list[Side], list[str]]:
    """Finished sides that share all facts but the program with the newest, in order of time, and
    why the others are left out. A baseline of a run that is there itself is the same run."""
    excluded = [f"{side.name} is {side.status}" for side in sides if side.status != "finished"]
    ordered = sorted(
        (side for side in sides if side.status == "finished"), key=lambda side: side.created_utc
    )
    compatible: dict[tuple[str, frozenset[PairKey]], Side] = {}
    for side in ordered:
        differing = [
            f"{fact} ({side.facts[fact]})"
            for fact in side.facts.keys() & ordered[-1].facts.keys() - _PROGRAM
            if side.facts[fact] != ordered[-1].facts[fact]
        ]
        if differing:
            words = ", ".join(sorted(differing))
            excluded.append(f"{side.name} does not belong with {ordered[-1].name}: {words}")
        else:
            compatible.setdefault((side.created_utc, frozenset(side.cells)), side)
    return list(compatible.values()), excluded


def _list_rows(sides: Sequence[Side]) -> list[RowKey]:
    """All rows: task by task, in the newest run's order, what it does not have last."""
    place = {label: i for i, label in enumerate(sides[-1].rows)}
    keys = dict.fromkeys(cell.row for side in sides for cell in side.cells.values())
    return sorted(keys, key=lambda key: (key.task, place.get(key.label, len(place))))


def _is_noisy(figure: str, label: str, sides: Iterable[Side]) -> bool:
    """Whether equal programs may differ in a row's figure. An output is never bad by chance."""
    if figure in (SPEEDUP, BAD):
        return figure == SPEEDUP
    return not all(side.rows[label].timing_free for side in sides if label in side.rows)


def _find_changes(
    label: str, values: Sequence[float | None], noisy: bool, level: float, sides: Sequence[Side]
) -> tuple[ChangePoint, ...]:
    known = [i for i, value in enumerate(values) if value is not None]
    series = [value for value in values if value is not None]
    shifts = (
        changes.find_level_shifts(series, level=level)
        if noisy
        else changes.find_exact_changes(series)
    )
    points = []
    for shift in shifts:
        last, first = known[shift.at - 1], known[shift.at]
        params = _changed_params(label, sides[last], sides[first])
        points.append(ChangePoint(last, first, shift.before, shift.after, shift.p, params))
    return tuple(points)


def _changed_params(label: str, before: Side, after: Side) -> tuple[str, ...]:
    """A row's parameters that differ between two runs."""
    was, now = (side.rows[label].params if label in side.rows else {} for side in (before, after))
    return tuple(describe_changed_params(was, now))


def _speedup(side: Side, key: RowKey) -> float | None:
    """Decode speedup over vanilla of the same prompts and passes, over all processes."""
    if side.noisy:
        return None
    vanilla_time = own_time = 0.0
    pairs = cells = 0
    for process in side.processes or (tuple(side.cells.values()),):
        plain = {_pair_key(cell.key): cell for cell in process if cell.key.label == BASELINE}
        for cell in process:
            if cell.row != key:
                continue
            cells += 1
            base, own = _decode_time(plain.get(_pair_key(cell.key))), _decode_time(cell)
            if base is not None and own is not None:
                vanilla_time += base[0] * own[1] / base[1]
                own_time += own[0]
                pairs += 1
    return vanilla_time / own_time if pairs and cells - pairs <= MAX_UNTIMED * cells else None


def _pair_key(key: PairKey) -> tuple[str, int, int, int]:
    """What a method's cell and vanilla's share."""
    return key.prompt_id, key.turn, key.pass_, key.seed


def _decode_time(cell: ComparedOutput | None) -> tuple[int, int] | None:
    """Time and tokens of decoding; null where either is unknown or nothing."""
    if cell is None or cell.times is None or cell.error is not None:
        return None
    time, tokens = cell.times.decode, cell.counters.committed
    return (time, tokens) if time and tokens else None


def _make_ratio(
    counts: Callable[[ComparedOutput], tuple[int | None, int | None]],
) -> Callable[[Side, RowKey], float | None]:
    """A ratio of sums over a row's outputs; null where a count is unknown, or none below."""

    def value(side: Side, key: RowKey) -> float | None:
        pairs = [counts(cell) for cell in _outputs(side, key)]
        above = [first for first, _ in pairs if first is not None]
        below = [second for _, second in pairs if second is not None]
        whole, total = len(above) == len(below) == len(pairs), sum(below)
        return sum(above) / total if whole and total else None

    return value


def _outputs(side: Side, key: RowKey) -> list[ComparedOutput]:
    """A row's outputs, failed ones left out."""
    return [cell for cell in side.cells.values() if cell.row == key and cell.error is None]


def _count_bad(side: Side, key: RowKey) -> float | None:
    own = [cell for cell in side.cells.values() if cell.row == key]
    return float(sum(map(is_bad, own))) if own else None


_VALUES: Mapping[str, Callable[[Side, RowKey], float | None]] = {
    SPEEDUP: _speedup,
    MAT: _make_ratio(lambda cell: (cell.counters.committed, cell.counters.steps)),
    ACCEPTANCE: _make_ratio(lambda cell: (cell.counters.accepted, cell.counters.levels)),
    BAD: _count_bad,
}
