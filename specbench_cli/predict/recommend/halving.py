"""Successive halving: a search for the fastest of many candidates (methods with parameters).

All candidates decode a few prompts. The faster half decodes twice as many prompts, and so on until
one candidate is left. Each round gets an equal share of the remaining time (Jamieson & Talwalkar,
"Non-stochastic Best Arm Identification and Hyperparameter Optimization", AISTATS 2016).

Candidates are ranked by their speedup over vanilla on the prompts of all rounds so far. Each round
uses new prompts. The caller measures the rounds and reports how long each took.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.store.record_queries import drop_prompt_errors
from specbench_cli.store.schema import BASELINE, Record
from specbench_cli.summary.pairing import pair_times, total_time

SEARCH_SHARE = 0.6
"""Share of the time budget for the search; the rest is for the confirmation."""
PILOT_PROMPTS = 2
"""Number of prompts that vanilla alone decodes first, to measure the speed of this machine."""
FIRST_PROMPTS, PROMPT_GROWTH = 2, 2
"""Number of prompts in the first round, and its growth factor from round to round.

If the time is too short for this, the search drops candidates until each method has one, then uses
fewer prompts, then the same number in every round. At last it drops methods.
"""
MIN_OUTPUT_S = 0.02
"""Minimum estimated time of an output in seconds, because the timer does not cover all work."""
MIN_ROUND_S = 1.0
"""Minimum time limit of a round in seconds. A round always measures at least one prompt."""

PILOT, CONFIRMATION = "pilot", "confirmation"


@dataclass(frozen=True)
class RoundResult:
    """Records of a round of the search, and the duration of the round in seconds with
    all overhead.
    """

    records: Sequence[Record]
    seconds: float


class Measure(Protocol):
    """Function that measures candidates and vanilla on some prompts."""

    def __call__(
        self, name: str, rows: Sequence[str], prompts: Sequence[str], limit_s: float
    ) -> RoundResult:
        """Measure a round.

        Args:
            name: name of the round.
            rows: labels of the candidates. Vanilla is always measured as well.
            prompts: prompt ids.
            limit_s: time limit in seconds, after which no further prompt is started.
        """


@dataclass(frozen=True)
class SearchSpace:
    """Candidates of a search.

    waves: groups of labels, in the order of trial. The first group has each method with the given
        parameters. In later groups, one parameter of each method is changed.
    kinds: label -> True if the candidate is lossless. Lossless and lossy candidates are halved
        separately.
    warm_tokens: number of warm-up tokens of each candidate before a round is timed. check_tokens:
        number of tokens that the check of outputs recomputes after a long round.
    """

    waves: Sequence[Sequence[str]]
    kinds: Mapping[str, bool]
    warm_tokens: int = 0
    check_tokens: int = 0

    @property
    def labels(self) -> list[str]:
        """All labels, in the order of trial."""
        return [label for wave in self.waves for label in wave]


@dataclass
class Trial:
    """Results of a candidate so far.

    rounds: number of rounds in which the candidate was measured.
    ratio: speedup over vanilla, paired by prompt; None if there is none.
    prompts: number of turns that the candidate decoded.
    out: reason why the candidate was removed. None if it was not removed, or only because it was
        slower.
    """

    label: str
    rounds: int = 0
    ratio: float | None = None
    prompts: int = 0
    out: str | None = None


@dataclass
class BestCandidate:
    """Result of a search.

    winners: the best lossless candidate, and then the best lossy candidate.
    trials: label -> trial, for all candidates that were started, in order.
    untried: labels for which there was no time.
    rounds: number of rounds.
    spent_s: duration of all rounds in seconds.
    estimates: final time estimates.
    """

    winners: list[str]
    trials: dict[str, Trial]
    untried: list[str]
    rounds: int
    spent_s: float
    estimates: TimeEstimates


@dataclass
class TimeEstimates:
    """Time estimates in seconds for this machine, updated after each measured round.

    round_overhead_s: overhead of a round.
    records_by_label: label -> time of its outputs for one prompt.
    output_overhead_s: overhead of an output.
    warm_s: warm-up of a candidate.
    check_s: check after a long round.
    read_s: time to check vanilla's outputs for one prompt after the confirmation.
    """

    round_overhead_s: float = 0.0
    label_s: dict[str, float] = field(default_factory=dict)
    output_overhead_s: float = 0.0
    warm_s: float = 0.0
    check_s: float = 0.0
    read_s: float = 0.0

    @classmethod
    def from_pilot(
        cls, pilot: RoundResult, warm_tokens: int, check_tokens: int = 0
    ) -> TimeEstimates:
        """Return estimates from the pilot round, in which vanilla ran alone."""
        estimates = cls()
        ns = sum(record.ns.total or 0 for record in pilot.records)
        tokens = sum(record.n_tokens or 0 for record in pilot.records)
        estimates.round_overhead_s = max(0.0, pilot.seconds - ns / 1e9)
        estimates.warm_s = warm_tokens * ns / 1e9 / max(1, tokens)
        estimates.check_s = check_tokens * ns / 1e9 / max(1, tokens)
        estimates._learn(pilot.records)
        return estimates

    def learn(self, round_: RoundResult, rows: int) -> None:
        """Update the estimates with the measured times of a round."""
        self._learn(round_.records)
        spent = sum(record.ns.total or 0 for record in round_.records) / 1e9
        rest = round_.seconds - spent - self.round_overhead_s - (rows + 1) * self.warm_s
        self.output_overhead_s = max(0.0, rest / max(1, len(round_.records)))
        self.round_overhead_s = max(
            0.0, self.round_overhead_s + min(0.0, rest)
        )  # the pilot round also loaded files for the first time

    def prompt_s(self, rows: Iterable[str]) -> float:
        """Return the estimated time of one prompt for vanilla and some candidates.

        A candidate without an estimate is assumed to take as long as vanilla.
        """
        usual = self.label_s.get(BASELINE, 0.0)
        own = [self.label_s.get(label, usual) for label in (BASELINE, *rows)]
        return sum(max(MIN_OUTPUT_S, cell) + self.output_overhead_s for cell in own)

    def max_prompts(self, rows: Sequence[str], seconds: float) -> int:
        """Return the number of prompts that a round of candidates can decode in some seconds."""
        left = seconds - self.round_overhead_s - (len(rows) + 1) * self.warm_s
        return max(0, math.floor(left / self.prompt_s(rows)))

    def plan_confirmation(self, rows: Sequence[str], seconds: float) -> tuple[int, float]:
        """Return the number of prompts of a confirmation, and its time limit in seconds.

        All outputs of the confirmation are checked afterwards. This check needs the remaining time.
        """
        left = seconds - self.round_overhead_s - self.check_s - (len(rows) + 1) * self.warm_s
        prompt_s = self.prompt_s(rows)
        share = prompt_s / (prompt_s + self.read_s)
        return max(0, math.floor(left * share / prompt_s)), max(MIN_ROUND_S, left * share)

    def _learn(self, records: Sequence[Record]) -> None:
        """Store the time that each label takes for one prompt, over all its turns."""
        spent: dict[str, float] = {}
        prompt_ids: dict[str, set[str]] = {}
        for record in records:
            spent[record.label] = spent.get(record.label, 0.0) + (record.ns.total or 0) / 1e9
            prompt_ids.setdefault(record.label, set()).add(record.prompt_id)
        self.label_s |= {label: spent[label] / len(prompt_ids[label]) for label in spent}
        read = [each.ns.prefill for each in records if each.label == BASELINE and each.ns.prefill]
        if read:  # factor 2: prompt and output, assuming the checking module is as fast
            self.read_s = 2 * sum(read) / 1e9 / len(prompt_ids[BASELINE])


def halve(
    candidates: SearchSpace, prompts: Sequence[str], seconds: float, measure: Measure
) -> BestCandidate:
    """Search for the best candidates by successive halving.

    Args:
        candidates: methods with parameters to choose from.
        prompts: ids of the search prompts, in the order of use.
        seconds: time limit of the search.
        measure: function that measures a round.

    Raises:
        UsageError: the time is too short for one round of two candidates.
        EnvironmentFault: a round has no usable time, because the machine was noisy.
    """
    pilot = measure(PILOT, [], prompts[:PILOT_PROMPTS], seconds)
    estimates, spent = (
        TimeEstimates.from_pilot(pilot, candidates.warm_tokens, candidates.check_tokens),
        pilot.seconds,
    )
    remaining = _select_first(candidates, len(prompts), seconds - spent, estimates)
    untried = [label for label in candidates.labels if label not in remaining]
    trials = {label: Trial(label) for label in remaining}
    records: dict[str, list[Record]] = {BASELINE: []}
    n_used = rounds = 0
    while _is_undecided(remaining, candidates.kinds) or not rounds:
        left = seconds - spent
        share = left / _rounds(len(remaining))
        # If the round's share of the time is too short for one prompt, take time from later rounds.
        # These have fewer candidates.
        fits = max(
            estimates.max_prompts(remaining, share), min(1, estimates.max_prompts(remaining, left))
        )
        n_new = min(fits, _prompts_per_round(len(prompts) - n_used, _rounds(len(remaining))))
        if not rounds:
            n_new = max(1, n_new)  # at least one round is needed to choose
        if n_new < 1:
            break  # no time or prompts are left: choose by the rounds so far
        rounds += 1
        limit = max(
            MIN_ROUND_S,
            share - estimates.round_overhead_s - (len(remaining) + 1) * estimates.warm_s,
        )
        done = measure(f"round-{rounds}", remaining, prompts[n_used : n_used + n_new], limit)
        n_used, spent = n_used + n_new, spent + done.seconds
        estimates.learn(done, len(remaining))
        for record in done.records:
            records.setdefault(record.label, []).append(record)
        _judge(remaining, trials, records, rounds)
        remaining = _better_half(remaining, candidates.kinds, trials)
    winners = _winners(remaining, candidates.kinds, trials)
    return BestCandidate(winners, trials, untried, rounds, spent, estimates)


def _select_first(
    candidates: SearchSpace, prompts: int, seconds: float, estimates: TimeEstimates
) -> list[str]:
    """Return the candidates of the first round."""
    labels, least = candidates.labels, len(candidates.waves[0])
    for first in range(min(FIRST_PROMPTS, prompts), 0, -1):
        for n in range(len(labels), min(least, len(labels)) - 1, -1):
            if _cost(labels[:n], first, estimates) <= seconds:
                return labels[:n]
    for n in range(min(least, len(labels)), 0, -1):
        if _cost(labels[:n], 1, estimates, more=1) <= seconds:
            return labels[:n]
    needed = _cost(labels[:2], 1, estimates) / SEARCH_SHARE
    raise UsageError(
        f"the time is too short: a round of {len(labels[:2])} candidates on one prompt"
        f" takes about {_cost(labels[:2], 1, estimates):.0f} s here, but only"
        f" {max(0.0, seconds):.0f} s are left for the search",
        f"--minutes {math.ceil(2 * needed / 60) + 1}, fewer tokens (--max-new-tokens), or a smaller"
        " --target",
    )


def _cost(
    labels: Sequence[str], first: int, estimates: TimeEstimates, more: int = PROMPT_GROWTH
) -> float:
    """Return the estimated seconds of all rounds of a search.

    Args:
        labels: candidates of the first round.
        first: number of prompts of the first round.
        more: factor of the number of prompts from round to round.
    """
    seconds, n, n_new = 0.0, len(labels), first
    while True:
        own = labels[:n]
        seconds += (
            estimates.round_overhead_s
            + (n + 1) * estimates.warm_s
            + n_new * estimates.prompt_s(own)
        )
        if n <= 2:
            return seconds
        n, n_new = math.ceil(n / 2), n_new * more


def _rounds(n: int) -> int:
    """Return the number of rounds that reduce n candidates to one."""
    return max(1, math.ceil(math.log2(max(1, n))))


def _prompts_per_round(prompts: int, rounds: int) -> int:
    """Return the number of prompts of the next round, if each round has twice as many.

    Args:
        prompts: number of prompts that are left.
        rounds: number of rounds that are left.
    """
    return min(prompts, max(1, prompts // ((1 << rounds) - 1)))


def _of_kind(labels: Sequence[str], kinds: Mapping[str, bool], kind: bool) -> list[str]:
    return [label for label in labels if kinds[label] is kind]


def _is_undecided(remaining: Sequence[str], kinds: Mapping[str, bool]) -> bool:
    """Return True if more than one lossless candidate, or more than one lossy
    candidate, is left.
    """
    return any(len(_of_kind(remaining, kinds, kind)) > 1 for kind in (True, False))


def _judge(
    remaining: Sequence[str],
    trials: Mapping[str, Trial],
    records: Mapping[str, Sequence[Record]],
    rounds: int,
) -> None:
    """Update the candidates' trials after a round.

    A trial gets the speedup so far, or the reason why its candidate is removed.

    Raises:
        EnvironmentFault: no time can be used, because the machine was noisy.
    """
    for label in remaining:
        trials[label].rounds = rounds
        trials[label].out = _fault(drop_prompt_errors(records.get(label, ()), records[BASELINE]))
    records_by_label = {label: records.get(label, ()) for label in remaining}
    ratios = (
        pair_times(records[BASELINE], records_by_label, total_time).ratios()
        if records[BASELINE]
        else {}
    )
    for label in remaining:
        trials[label].ratio = ratios.get(label)
        trials[label].prompts = len({(r.prompt_id, r.turn) for r in records_by_label[label]})
    if not ratios and any(trials[label].out is None for label in remaining):
        raise EnvironmentFault(
            "no time of this round is usable, because other programs used the machine",
            "close other programs (specbench doctor measures them), or keep noisy times:"
            " --allow-noise",
        )


def _fault(records: Sequence[Record]) -> str | None:
    """Return the first error or mismatch of a candidate, or None."""
    if not records:
        return "it was not measured"
    for record in records:
        if record.error is not None:
            return record.error
        if record.verdict is not None and record.verdict.kind == "mismatch":
            return f"its output on {record.prompt_id} is not vanilla's"
    return None


def _better_half(
    remaining: Sequence[str], kinds: Mapping[str, bool], trials: Mapping[str, Trial]
) -> list[str]:
    """Return the candidates of the next round, without those that had an error or a mismatch.

    They are the faster half of the lossless candidates, and the faster half of the lossy ones.
    """
    kept: list[str] = []
    for kind in (True, False):
        own = _of_kind(remaining, kinds, kind)
        sound = [label for label in own if trials[label].out is None]
        ranked = _rank(sound, trials)
        kept += ranked[: max(1, math.ceil(len(own) / 2))]
    return kept


def _rank(labels: Sequence[str], trials: Mapping[str, Trial]) -> list[str]:
    """Sort labels by speedup, fastest first. Labels without a speedup are last.

    Labels with equal speedups keep their order.
    """
    return sorted(labels, key=lambda label: -(trials[label].ratio or 0.0))


def _winners(
    remaining: Sequence[str], kinds: Mapping[str, bool], trials: Mapping[str, Trial]
) -> list[str]:
    """Return the best lossless candidate and the best lossy candidate, if there are any."""
    found = [_rank(_of_kind(remaining, kinds, kind), trials)[:1] for kind in (True, False)]
    return [label for best in found for label in best if trials[label].ratio is not None]
