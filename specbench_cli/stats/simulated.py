"""Runs that never were: times of methods whose true speedups are known.

The tests and docs/explanations/statistics.md say how often the statistics are right about them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specbench_cli.stats.bootstrap import PairedTimes, intervals, rare_questions, resample
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
    rare: share of questions that are `slowdown` times slower with the methods and, if
        `rare_for_all`, also with vanilla.
    student: degrees of freedom of a Student's t. Its absolute value multiplies the time of a
        question with the methods. 0 turns this off.
    """

    questions: int = 48
    families: int = 6
    passes: int = 1
    spread: float = 0.5
    vanilla_spread: float = 0.5
    common: float = 0.0
    process_spread: float = 0.0
    rare: float = 0.0
    slowdown: float = 20.0
    rare_for_all: bool = False
    student: float = 0.0

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
        if self.student:
            factor = np.abs(rng.standard_t(self.student, (shared, 1, self.questions)))
            method = method * factor
        if self.rare:
            slow = rng.random((shared, 1, self.questions)) < self.rare
            factor = np.where(slow, self.slowdown, 1.0)
            method = method * factor
            vanilla = vanilla * factor if self.rare_for_all else vanilla
        strata = np.arange(self.questions) % self.families
        return PairedTimes(np.broadcast_to(vanilla, cells), method, strata)

    @property
    def log_speedup(self) -> float:
        """The truth: log of the expected times' ratio."""
        spreads = (self.spread, self.common, self.process_spread, _WITHIN)
        slower = 0.0 if self.rare_for_all else self.rare * (self.slowdown - 1)
        log = -sum(spread**2 for spread in spreads) / 2 - math.log1p(slower)
        if df := self.student:
            mean = 2 * math.sqrt(df / math.pi) / (df - 1)
            log -= math.log(mean) + math.lgamma((df + 1) / 2) - math.lgamma(df / 2)
        return log


@dataclass(frozen=True, slots=True)
class Coverage:
    """Coverage of the 95% intervals of a speedup, as shares of the simulated runs.

    with_interval: runs with an interval. covered: the interval covers the true speedup. above,
    below: it lies above or below the true speedup. warned: the run warns of rare questions.
    covered_warned, covered_unwarned: coverage of the intervals in runs with and without that
    warning; nan if there are none.
    """

    with_interval: float
    covered: float
    above: float
    below: float
    warned: float
    covered_warned: float
    covered_unwarned: float


def coverage(setting: Setting, replications: int, *, resamples: int = 999, seed: int = 0) -> float:
    """How often the 95% interval of a speedup holds the truth."""
    return coverage_details(setting, replications, resamples=resamples, seed=seed).covered


def coverage_details(
    setting: Setting, replications: int, *, resamples: int = 999, seed: int = 0
) -> Coverage:
    """Return how often intervals cover, exceed or fall below the true speedup, and how often a run
    warns of rare questions."""
    rng = np.random.default_rng(seed)
    truth = np.exp(setting.log_speedup)
    found = list[tuple[bool, bool, bool, bool]]()  # with_interval, above, below, warned
    for start in range(0, replications, _AT_ONCE):
        count = min(_AT_ONCE, replications - start)
        times = setting.times(rng, count, one_vanilla=False)
        drawn = resample(times, resamples=resamples)
        for estimate, rare in zip(intervals(drawn), rare_questions(times), strict=True):
            low, high = estimate.low, estimate.high
            if low is None or high is None:
                found.append((False, False, False, rare is not None))
            else:
                found.append((True, bool(low > truth), bool(high < truth), rare is not None))
    with_interval, above, below, warned = np.array(found).T
    covered = with_interval & ~above & ~below

    def share(of: NDArray[np.bool_]) -> float:
        return float(covered[of].mean()) if of.any() else float("nan")

    return Coverage(
        with_interval=float(with_interval.mean()),
        covered=float(covered.mean()),
        above=float(above.mean()),
        below=float(below.mean()),
        warned=float(warned.mean()),
        covered_warned=share(with_interval & warned),
        covered_unwarned=share(with_interval & ~warned),
    )


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
