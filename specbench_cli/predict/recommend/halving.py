"""Successive halving: all candidates on few prompts, the better half of them on twice as many,
until one is left (Jamieson & Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter
Optimization", AISTATS 2016). Each round gets an equal share of the time that is left.

How good a candidate is, is how many times as fast as vanilla it was on the prompts of all rounds so
far, paired; each round asks prompts that none before has asked. Nothing here knows a clock: what is
measured says how long it took.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.store.recorded import drop_prompt_errors
from specbench_cli.store.schema import BASELINE, Record
from specbench_cli.summary.pairing import pair_times, total_time

SEARCH = 0.6
"""Share of the time that is searched in; the rest confirms what was found."""
PILOT_PROMPTS = 2
"""Prompts that vanilla alone decodes first, to see how fast this machine is."""
FIRST, MORE = 2, 2
"""Prompts that a search is begun with, and how many times as many each round has as the one before,
where the time allows. Fewer candidates are begun, down to one of each method, before there are
fewer prompts; and rounds have as many each, before a method is left out."""
FASTEST = 0.02
"""Seconds that an output is taken to need at least, whatever the pilot says: what no clock sees of
it."""
MINIMAL = 1.0
"""Shortest time limit of a round, in seconds: one prompt is measured whatever it says."""

PILOT, CONFIRMATION = "pilot", "confirmation"


@dataclass(frozen=True)
class RoundResult:
    """What became of a round: its records, and how many seconds it took with all that belongs to
    it."""

    records: Sequence[Record]
    seconds: float


class Measure(Protocol):
    """Measures rows and vanilla on prompts."""

    def __call__(
        self, name: str, rows: Sequence[str], prompts: Sequence[str], limit_s: float
    ) -> RoundResult:
        """Measure.

        Args:
            name: of the round.
            rows: labels of candidates; vanilla is measured beside them in any case.
            prompts: ids. limit_s: seconds after which no further prompt is begun.
        """


@dataclass(frozen=True)
class SearchSpace:
    """What is searched.

    waves: labels in the order in which they are tried: first each method as it is, then with one
        setting changed, and so on. kinds: label -> whether it is lossless: halving goes on among
        each kind by itself. warm_tokens: tokens that a row decodes before a round is timed.
        check_tokens: those that are read once more, one by one, after a long round.
    """

    waves: Sequence[Sequence[str]]
    kinds: Mapping[str, bool]
    warm_tokens: int = 0
    check_tokens: int = 0

    @property
    def labels(self) -> list[str]:
        """All of them, in their order."""
        return [label for wave in self.waves for label in wave]


@dataclass
class Trial:
    """How far a candidate came.

    rounds: that it was measured in. ratio: over vanilla, paired, on `prompts` prompts' turns; None
    where it has none. out: why it left, if not for being slower.
    """

    label: str
    rounds: int = 0
    ratio: float | None = None
    prompts: int = 0
    out: str | None = None


@dataclass
class BestCandidate:
    """A search's end.

    winners: the best of each kind that is there, lossless first. trials: of all candidates that
    were begun, in their order. untried: those for which there was no time. rounds: how many there
    were. spent_s: seconds of them all.
    """

    winners: list[str]
    trials: dict[str, Trial]
    untried: list[str]
    rounds: int
    spent_s: float
    pace: TimeEstimates


@dataclass
class TimeEstimates:
    """What things take here, in seconds: a round, a row's outputs on a prompt, what is decoded of a
    row before, what is checked behind a long one, and how long it takes to read an output of
    vanilla's there; learnt as rounds are measured."""

    round_s: float = 0.0
    cells: dict[str, float] = field(default_factory=dict)
    around_s: float = 0.0
    warm_s: float = 0.0
    check_s: float = 0.0
    read_s: float = 0.0

    @classmethod
    def of(cls, pilot: RoundResult, warm_tokens: int, check_tokens: int = 0) -> TimeEstimates:
        """By what vanilla alone took."""
        pace = cls()
        ns = sum(record.ns.total or 0 for record in pilot.records)
        tokens = sum(record.n_tokens or 0 for record in pilot.records)
        pace.round_s = max(0.0, pilot.seconds - ns / 1e9)
        pace.warm_s = warm_tokens * ns / 1e9 / max(1, tokens)
        pace.check_s = check_tokens * ns / 1e9 / max(1, tokens)
        pace._learn(pilot.records)
        return pace

    def learn(self, round_: RoundResult, rows: int) -> None:
        """Take note of a round."""
        self._learn(round_.records)
        spent = sum(record.ns.total or 0 for record in round_.records) / 1e9
        rest = round_.seconds - spent - self.round_s - (rows + 1) * self.warm_s
        self.around_s = max(0.0, rest / max(1, len(round_.records)))
        self.round_s = max(0.0, self.round_s + min(0.0, rest))  # the first one loaded more

    def prompt_s(self, rows: Iterable[str]) -> float:
        """Of a prompt by vanilla and rows; one that nothing is known of counts as vanilla does."""
        usual = self.cells.get(BASELINE, 0.0)
        own = [self.cells.get(label, usual) for label in (BASELINE, *rows)]
        return sum(max(FASTEST, cell) + self.around_s for cell in own)

    def fits(self, rows: Sequence[str], seconds: float) -> int:
        """How many prompts of a round there is time for."""
        left = seconds - self.round_s - (len(rows) + 1) * self.warm_s
        return max(0, math.floor(left / self.prompt_s(rows)))

    def confirmation(self, rows: Sequence[str], seconds: float) -> tuple[int, float]:
        """How many prompts there is time for if all outputs are checked behind them, and after how
        many seconds no further one may be begun."""
        left = seconds - self.round_s - self.check_s - (len(rows) + 1) * self.warm_s
        prompt_s = self.prompt_s(rows)
        share = prompt_s / (prompt_s + self.read_s)
        return max(0, math.floor(left * share / prompt_s)), max(MINIMAL, left * share)

    def _learn(self, records: Sequence[Record]) -> None:
        """Seconds of a prompt, all its turns, by row."""
        spent: dict[str, float] = {}
        asked: dict[str, set[str]] = {}
        for record in records:
            spent[record.label] = spent.get(record.label, 0.0) + (record.ns.total or 0) / 1e9
            asked.setdefault(record.label, set()).add(record.prompt_id)
        self.cells |= {label: spent[label] / len(asked[label]) for label in spent}
        read = [each.ns.prefill for each in records if each.label == BASELINE and each.ns.prefill]
        if read:  # prompt and output, by a module that is no faster than ours
            self.read_s = 2 * sum(read) / 1e9 / len(asked[BASELINE])


def halve(
    candidates: SearchSpace, prompts: Sequence[str], seconds: float, measure: Measure
) -> BestCandidate:
    """Search.

    Args:
        prompts: ids of those that may be searched on, in the order in which they are asked.
        seconds: for all of it.
    Raises:
        UsageError: not even one round of two candidates fits.
        EnvironmentFault: noise left no time to choose by; or every candidate failed.
    """
    pilot = measure(PILOT, [], prompts[:PILOT_PROMPTS], seconds)
    pace, spent = (
        TimeEstimates.of(pilot, candidates.warm_tokens, candidates.check_tokens),
        pilot.seconds,
    )
    alive = _select_first(candidates, len(prompts), seconds - spent, pace)
    untried = [label for label in candidates.labels if label not in alive]
    trials = {label: Trial(label) for label in alive}
    records: dict[str, list[Record]] = {BASELINE: []}
    asked = rounds = 0
    while _is_undecided(alive, candidates.kinds) or not rounds:
        left = seconds - spent
        share = left / _rounds(len(alive))
        # A prompt that its share is too short for comes out of later rounds, which have fewer rows.
        fits = max(pace.fits(alive, share), min(1, pace.fits(alive, left)))
        fresh = min(fits, _prompts_per_round(len(prompts) - asked, _rounds(len(alive))))
        if not rounds:
            fresh = max(1, fresh)  # a search without a round would know nothing
        if fresh < 1:
            break  # time or prompts are over: what is known decides
        rounds += 1
        limit = max(MINIMAL, share - pace.round_s - (len(alive) + 1) * pace.warm_s)
        done = measure(f"round-{rounds}", alive, prompts[asked : asked + fresh], limit)
        asked, spent = asked + fresh, spent + done.seconds
        pace.learn(done, len(alive))
        for record in done.records:
            records.setdefault(record.label, []).append(record)
        _judge(alive, trials, records, rounds)
        alive = _better_half(alive, candidates.kinds, trials)
    winners = _winners(alive, candidates.kinds, trials)
    return BestCandidate(winners, trials, untried, rounds, spent, pace)


def _select_first(
    candidates: SearchSpace, prompts: int, seconds: float, pace: TimeEstimates
) -> list[str]:
    """Which candidates are begun."""
    labels, least = candidates.labels, len(candidates.waves[0])
    for first in range(min(FIRST, prompts), 0, -1):
        for n in range(len(labels), min(least, len(labels)) - 1, -1):
            if _cost(labels[:n], first, pace) <= seconds:
                return labels[:n]
    for n in range(min(least, len(labels)), 0, -1):
        if _cost(labels[:n], 1, pace, more=1) <= seconds:
            return labels[:n]
    needed = _cost(labels[:2], 1, pace) / SEARCH
    raise UsageError(
        f"there is no time to try anything: a round of {len(labels[:2])} candidates on one prompt"
        f" would take about {_cost(labels[:2], 1, pace):.0f} s here, of {max(0.0, seconds):.0f} s"
        " that are left to search in",
        f"--minutes {math.ceil(2 * needed / 60) + 1}, fewer tokens (--max-new-tokens), or a smaller"
        " --target",
    )


def _cost(labels: Sequence[str], first: int, pace: TimeEstimates, more: int = MORE) -> float:
    """Seconds of all rounds of a search that begins so, each with `more` times the prompts."""
    seconds, n, fresh = 0.0, len(labels), first
    while True:
        own = labels[:n]
        seconds += pace.round_s + (n + 1) * pace.warm_s + fresh * pace.prompt_s(own)
        if n <= 2:
            return seconds
        n, fresh = math.ceil(n / 2), fresh * more


def _rounds(n: int) -> int:
    """Rounds that take n candidates to one."""
    return max(1, math.ceil(math.log2(max(1, n))))


def _prompts_per_round(prompts: int, rounds: int) -> int:
    """How many of the prompts that are left a round gets, if each has twice as many as the one
    before."""
    return min(prompts, max(1, prompts // ((1 << rounds) - 1)))


def _of_kind(labels: Sequence[str], kinds: Mapping[str, bool], kind: bool) -> list[str]:
    return [label for label in labels if kinds[label] is kind]


def _is_undecided(alive: Sequence[str], kinds: Mapping[str, bool]) -> bool:
    """Whether a kind has more than one left."""
    return any(len(_of_kind(alive, kinds, kind)) > 1 for kind in (True, False))


def _judge(
    alive: Sequence[str],
    trials: Mapping[str, Trial],
    records: Mapping[str, Sequence[Record]],
    rounds: int,
) -> None:
    """Say of each candidate how fast it was so far, or why it is out."""
    for label in alive:
        trials[label].rounds = rounds
        trials[label].out = _fault(drop_prompt_errors(records.get(label, ()), records[BASELINE]))
    cells = {label: records.get(label, ()) for label in alive}
    ratios = pair_times(records[BASELINE], cells, total_time).ratios() if records[BASELINE] else {}
    for label in alive:
        trials[label].ratio = ratios.get(label)
        trials[label].prompts = len({(r.prompt_id, r.turn) for r in cells[label]})
    if not ratios and any(trials[label].out is None for label in alive):
        raise EnvironmentFault(
            "no time of this round can be believed: the machine was not quiet",
            "close other programs (specbench doctor measures them), or keep such times:"
            " --allow-noise",
        )


def _fault(records: Sequence[Record]) -> str | None:
    """What is wrong with a candidate: its first error, or an output that is not vanilla's."""
    if not records:
        return "it was not measured"
    for record in records:
        if record.error is not None:
            return record.error
        if record.verdict is not None and record.verdict.kind == "mismatch":
            return f"its output on {record.prompt_id} is not vanilla's"
    return None


def _better_half(
    alive: Sequence[str], kinds: Mapping[str, bool], trials: Mapping[str, Trial]
) -> list[str]:
    """Those that go on: of each kind the faster half of what is sound."""
    kept: list[str] = []
    for kind in (True, False):
        own = _of_kind(alive, kinds, kind)
        sound = [label for label in own if trials[label].out is None]
        ranked = _rank(sound, trials)
        kept += ranked[: max(1, math.ceil(len(own) / 2))]
    return kept


def _rank(labels: Sequence[str], trials: Mapping[str, Trial]) -> list[str]:
    """The fastest first; those without a figure last, equals in the order in which they came."""
    return sorted(labels, key=lambda label: -(trials[label].ratio or 0.0))


def _winners(
    alive: Sequence[str], kinds: Mapping[str, bool], trials: Mapping[str, Trial]
) -> list[str]:
    """The best of each kind."""
    found = [_rank(_of_kind(alive, kinds, kind), trials)[:1] for kind in (True, False)]
    return [label for best in found for label in best if trials[label].ratio is not None]
