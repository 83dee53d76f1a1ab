"""Runs that never were: times of methods whose true speedups are known.

The tests and docs/statistics.md say how often the statistics are right about them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from specbench_cli.stats.bootstrap import PairedTimes, intervals, resample
from specbench_cli.stats.simultaneous import different

_AT_ONCE = 25
_WITHIN = 0.02
"""Spread of repetitions of one cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How times are made; all spreads are standard deviations of logarithms.

    questions, families, passes: how many; questions are dealt to the families in turn.
    spread: of a method's speedups over the questions, its own.
    vanilla_spread: of vanilla's times over the questions.
    common: of what a question does to the speedups of all methods alike.
    process_spread: of what a process (pass) does to a method.
    """

    questions: int = 48
    families: int = 6
    passes: int = 1
    spread: float = 0.5
    vanilla_spread: float = 0.5
    common: float = 0.0
    process_spread: float = 0.0

    def times(
        self, rng: np.random.Generator, methods: int, *, one_vanilla: bool = True
    ) -> PairedTimes:
        """Times of equal methods; `one_vanilla`: they share its times, and the common effects."""
        shared = 1 if one_vanilla else methods
        cells = (methods, self.passes, self.questions)
        vanilla = rng.lognormal(0, self.vanilla_spread, (shared, 1, self.questions))
        vanilla = vanilla * rng.lognormal(0, _WITHIN, (shared, *cells[1:]))
        slower = rng.normal(0, self.common, (shared, 1, self.questions))
        slower = slower + rng.normal(0, self.spread, (methods, 1, self.questions))
        slower = slower + rng.normal(0, self.process_spread, (methods, self.passes, 1))
        method = vanilla * np.exp(slower + rng.normal(0, _WITHIN, cells))
        strata = np.arange(self.questions) % self.families
        return PairedTimes(np.broadcast_to(vanilla, cells), method, strata)

    @property
    def log_speedup(self) -> float:
        """The truth: log of the expected times' ratio."""
        spreads = (self.spread, self.common, self.process_spread, _WITHIN)
        return -sum(spread**2 for spread in spreads) / 2


def coverage(setting: Setting, replications: int, *, resamples: int = 999, seed: int = 0) -> float:
    """How often the 95% interval of a speedup holds the truth."""
    rng, hits = np.random.default_rng(seed), 0
    truth = np.exp(setting.log_speedup)
    for start in range(0, replications, _AT_ONCE):
        count = min(_AT_ONCE, replications - start)
        drawn = resample(setting.times(rng, count, one_vanilla=False), resamples=resamples)
        hits += sum(
            found.low is not None and found.high is not None and found.low <= truth <= found.high
            for found in intervals(drawn)
        )
    return hits / replications


def false_differences(
    setting: Setting, methods: int, replications: int, *, resamples: int = 499, seed: int = 0
) -> tuple[float, float]:
    """How often any two of equal methods get different letters, and how often any of their pairs
    differs when each is compared for itself."""
    rng, together, alone = np.random.default_rng(seed), 0, 0
    for _ in range(replications):
        drawn = resample(setting.times(rng, methods), resamples=resamples)
        together += bool(different(drawn).any())
        pairs = itertools.combinations(range(methods), 2)
        alone += any(different(drawn, methods=pair).any() for pair in pairs)
    return together / replications, alone / replications
