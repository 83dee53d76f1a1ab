"""Trends: metrics such as speedup and MAT over all runs in order of time, with change points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specbench_cli.comparison import side_sources
from specbench_cli.comparison.baselines import baseline
from specbench_cli.comparison.compared_output import ComparedOutput, PairKey, RowKey
from specbench_cli.comparison.deterministic import is_bad
from specbench_cli.comparison.side import Side, describe_changed_params
from specbench_cli.errors import UsageError
from specbench_cli.stats import changes
from specbench_cli.store.run_dir import RUNS
from specbench_cli.store.schema import BASELINE
from specbench_cli.summary.speedups import MAX_UNTIMED

SPEEDUP, MAT, ACCEPTANCE, BAD = "decode speedup", "MAT", "acceptance", "bad outputs"
FIGURES = (SPEEDUP, MAT, ACCEPTANCE, BAD)
"""Decode speedup: over vanilla of the same run. Acceptance: accepted / drafted levels. Bad outputs:
number of outputs that failed or are mismatches."""
FALSE_ALARMS = 0.05
"""Maximum probability that any change point in a noisy series is false, over all series
together."""
_PROGRAM = frozenset({"specbench", "commit"})
"""Facts that may differ, because trends show their effect."""


@dataclass(frozen=True, slots=True)
class TrendRun:
    """A run or baseline.

    commit: first digits of the program's commit; None if unknown.
    """

    name: str
    created_utc: str
    commit: str | None


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """A change of a metric between two consecutive runs.

    last: index in `Trends.runs` of the last run before the change.
    first: index of the first run after the change.
    before: median of the values since the previous change.
    after: median of the values until the next change.
    p: p-value; 0 for metrics without noise.
    params: parameters of the method that changed at the same time, as text.
    """

    last: int
    first: int
    before: float
    after: float
    p: float
    params: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendSeries:
    """A metric of a row (method on a task) in each run. Values are None for runs without it.

    noisy: True if the metric may differ between runs of the same program version. If False, every
        difference is reported as a change.
    """

    key: RowKey
    figure: str
    values: tuple[float | None, ...]
    noisy: bool
    changes: tuple[ChangePoint, ...] = ()

    @property
    def known_values(self) -> list[float]:
        """Values that are not None."""
        return [value for value in self.values if value is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trends:
    """Runs in order of time, and all metrics of all rows (methods on tasks) over these runs.

    left_out: sentences on runs that are not compatible with the newest run, and on times that are
        not used.
    level: significance level of the test of one series.
    """

    runs: tuple[TrendRun, ...]
    series: tuple[TrendSeries, ...]
    left_out: tuple[str, ...]
    level: float


def load_trends(sources: Sequence[str]) -> Trends:
    """Load the runs that `specbench compare --over-time` names, and return their trends.

    Args:
        sources: runs and baselines. If empty, load all runs and baselines.

    Raises:
        UsageError: an argument does not exist, or fewer than two runs are compatible.
    """
    if sources:
        return find_trends([side_sources.load_side(name) for name in sources])
    sides, unreadable = [], []
    for path in _find_sources():
        try:
            sides.append(side_sources.load_side(str(path)))
        except UsageError as error:
            unreadable.append(f"{path.name}: {error}")
    return find_trends(sides, unreadable)


def find_trends(sides: Sequence[Side], left_out: Sequence[str] = ()) -> Trends:
    """Return the trends of the runs (sides) that are compatible with the newest run.

    Args:
        left_out: sentences on runs that could not be loaded.

    Raises:
        UsageError: fewer than two runs are compatible.
    """
    compatible, excluded = _select_compatible(sides)
    if len(compatible) < 2:
        raise UsageError(
            "a trend needs two compatible runs"
            + "".join(f"\n  {line}" for line in (*left_out, *excluded)),
            hint="specbench list runs; specbench compare --over-time RUN RUN",
        )
    noisy = [
        f"{side.name} is labelled noisy: its times are not used"
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
    """Return the folders of all runs and the files of all baselines."""
    return [
        *(manifest.parent for manifest in sorted(RUNS.glob("*/manifest.json"))),
        *sorted(baseline.ROOT.glob("*/*.json")),
    ]


def _select_compatible(sides: Sequence[Side]) -> tuple[list[Side], list[str]]:
    """Return the finished runs that are compatible with the newest, and why the others are
    excluded.

    Runs are compatible if their facts are equal, except facts about the program version. The result
    is in order of time. If a run and its baseline are both present, only one is returned.
    """
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
            excluded.append(f"{side.name} is not compatible with {ordered[-1].name}: {words}")
        else:
            compatible.setdefault((side.created_utc, frozenset(side.outputs)), side)
    return list(compatible.values()), excluded


def _list_rows(sides: Sequence[Side]) -> list[RowKey]:
    """Return all rows, sorted by task and then in the order of the newest run's methods.

    Methods that the newest run lacks come last.
    """
    place = {label: i for i, label in enumerate(sides[-1].rows)}
    keys = dict.fromkeys(output.row for side in sides for output in side.outputs.values())
    return sorted(keys, key=lambda key: (key.task, place.get(key.label, len(place))))


def _is_noisy(figure: str, label: str, sides: Iterable[Side]) -> bool:
    """Return True if a metric may differ between runs of the same program version.

    The speedup may differ, the number of bad outputs may not. Other metrics may differ if a
    method's steps depend on timing.
    """
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
        last, first = known[shift.index - 1], known[shift.index]
        params = _changed_params(label, sides[last], sides[first])
        points.append(ChangePoint(last, first, shift.before, shift.after, shift.p, params))
    return tuple(points)


def _changed_params(label: str, before: Side, after: Side) -> tuple[str, ...]:
    """Return the parameters of a method that differ between two runs."""
    was, now = (side.rows[label].params if label in side.rows else {} for side in (before, after))
    return tuple(describe_changed_params(was, now))


def _speedup(side: Side, key: RowKey) -> float | None:
    """Return the decode speedup of a row over vanilla, from all processes of a side.

    Outputs are paired with vanilla's by prompt and repeat.
    """
    if side.noisy:
        return None
    vanilla_time = own_time = 0.0
    pairs = outputs = 0
    for process in side.processes or (tuple(side.outputs.values()),):
        plain = {
            _pair_key(output.key): output for output in process if output.key.label == BASELINE
        }
        for output in process:
            if output.row != key:
                continue
            outputs += 1
            base, own = _decode_time(plain.get(_pair_key(output.key))), _decode_time(output)
            if base is not None and own is not None:
                vanilla_time += base[0] * own[1] / base[1]
                own_time += own[0]
                pairs += 1
    return vanilla_time / own_time if pairs and outputs - pairs <= MAX_UNTIMED * outputs else None


def _pair_key(key: PairKey) -> tuple[str, int, int, int]:
    """Return the part of an output's key that is equal for vanilla's output of the same prompt."""
    return key.prompt_id, key.turn, key.pass_, key.seed


def _decode_time(output: ComparedOutput | None) -> tuple[int, int] | None:
    """Return decode time in ns and number of tokens; None if either is unknown or 0."""
    if output is None or output.times is None or output.error is not None:
        return None
    time, tokens = output.times.decode, output.counters.committed
    return (time, tokens) if time and tokens else None


def _make_ratio(
    counts: Callable[[ComparedOutput], tuple[int | None, int | None]],
) -> Callable[[Side, RowKey], float | None]:
    """Return a function that computes a ratio of two sums over a row's outputs.

    The ratio is None if a count is unknown or the divisor is 0.
    """

    def value(side: Side, key: RowKey) -> float | None:
        pairs = [counts(output) for output in _outputs(side, key)]
        above = [first for first, _ in pairs if first is not None]
        below = [second for _, second in pairs if second is not None]
        whole, total = len(above) == len(below) == len(pairs), sum(below)
        return sum(above) / total if whole and total else None

    return value


def _outputs(side: Side, key: RowKey) -> list[ComparedOutput]:
    """Return the outputs of a row that did not fail."""
    return [
        output for output in side.outputs.values() if output.row == key and output.error is None
    ]


def _count_bad(side: Side, key: RowKey) -> float | None:
    own = [output for output in side.outputs.values() if output.row == key]
    return float(sum(map(is_bad, own))) if own else None


_VALUES: Mapping[str, Callable[[Side, RowKey], float | None]] = {
    SPEEDUP: _speedup,
    MAT: _make_ratio(lambda output: (output.counters.committed, output.counters.steps)),
    ACCEPTANCE: _make_ratio(lambda output: (output.counters.accepted, output.counters.levels)),
    BAD: _count_bad,
}
