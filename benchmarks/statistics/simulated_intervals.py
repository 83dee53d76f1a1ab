"""Simulate the coverage of intervals and the errors of significance groups.

    python benchmarks/statistics/simulated_intervals.py [replications [TABLE ...]]

TABLE: intervals, rare, letters, differences; default: all. The script prints the tables in
docs/explanations/statistics.md.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specbench_cli.stats.bootstrap import (
    PairedTimes,
    estimate_speedups,
    find_rare_questions,
    resample,
)
from specbench_cli.stats.detectable import estimate_detectable_ratio
from specbench_cli.stats.simultaneous import find_different_pairs

_CHUNK = 25
_REPEAT_SPREAD = 0.02
"""Spread of repeated measurements of one output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """Settings of simulated times. All spreads are standard deviations of logarithms.

    questions, families, passes: numbers of questions, families and repeats. Question i belongs to
        family i modulo the number of families.
    spread: spread of a method's speedups over the questions.
    vanilla_spread: spread of vanilla's times over the questions.
    common: spread of the effect of a question on the speedups of all methods.
    process_spread: spread of the effect of a process (repeat) on a method.
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
        """Return times of equal methods. With `one_vanilla` they share vanilla's times."""
        shared = 1 if one_vanilla else methods
        cells = (methods, self.passes, self.questions)
        vanilla = rng.lognormal(0, self.vanilla_spread, (shared, 1, self.questions))
        vanilla = vanilla * rng.lognormal(0, _REPEAT_SPREAD, (shared, *cells[1:]))
        slower = rng.normal(0, self.common, (shared, 1, self.questions))
        slower = slower + rng.normal(0, self.spread, (methods, 1, self.questions))
        slower = slower + rng.normal(0, self.process_spread, (methods, self.passes, 1))
        method = vanilla * np.exp(slower + rng.normal(0, _REPEAT_SPREAD, cells))
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
        """Log of the true speedup, the ratio of the expected times."""
        spreads = (self.spread, self.common, self.process_spread, _REPEAT_SPREAD)
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


def coverage(
    settings: SimulationSettings, replications: int, *, resamples: int = 999, seed: int = 0
) -> float:
    """Return the coverage of the 95% interval of a speedup."""
    return coverage_details(settings, replications, resamples=resamples, seed=seed).covered


def coverage_details(
    settings: SimulationSettings, replications: int, *, resamples: int = 999, seed: int = 0
) -> Coverage:
    """Return the coverage of intervals, and how often a run warns of rare questions."""
    rng = np.random.default_rng(seed)
    truth = np.exp(settings.log_speedup)
    found = list[tuple[bool, bool, bool, bool]]()  # with_interval, above, below, warned
    for start in range(0, replications, _CHUNK):
        count = min(_CHUNK, replications - start)
        times = settings.times(rng, count, one_vanilla=False)
        drawn = resample(times, resamples=resamples)
        for estimate, rare in zip(
            estimate_speedups(drawn), find_rare_questions(times), strict=True
        ):
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
    settings: SimulationSettings,
    methods: int,
    replications: int,
    *,
    resamples: int = 499,
    seed: int = 0,
) -> tuple[float, float]:
    """Return how often equal methods are found to differ, jointly and pair by pair.

    Jointly means with the correction for multiple comparisons that significance groups use.
    """
    rng, joint, pairwise = np.random.default_rng(seed), 0, 0
    for _ in range(replications):
        drawn = resample(settings.times(rng, methods), resamples=resamples)
        joint += bool(find_different_pairs(drawn).any())
        pairs = itertools.combinations(range(methods), 2)
        pairwise += any(find_different_pairs(drawn, methods=pair).any() for pair in pairs)
    return joint / replications, pairwise / replications


def main() -> None:
    """Print the tables as Markdown."""
    replications = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    for table in sys.argv[2:] or TABLES:
        TABLES[table](replications)


def print_intervals(replications: int) -> None:
    """Print the coverage of intervals."""
    error = math.sqrt(0.95 * 0.05 / replications)
    write_line(f"coverage of 95% intervals: {replications} replications, error {error:.2%}\n")
    write_line("| questions | families | processes | both 0.5 | speedups 1 | times 1 | both 1 |")
    write_line("| --- | --- | --- | --- | --- | --- | --- |")
    for (questions, families), passes in itertools.product(((20, 1), (20, 5), (48, 6)), (1, 3)):
        cells = [
            coverage(
                SimulationSettings(
                    questions=questions,
                    families=families,
                    passes=passes,
                    spread=spread,
                    vanilla_spread=vanilla_spread,
                    process_spread=0.03 if passes > 1 else 0.0,
                ),
                replications,
            )
            for vanilla_spread, spread in ((0.5, 0.5), (0.5, 1.0), (1.0, 0.25), (1.0, 1.0))
        ]
        figures = " | ".join(f"{cell:.1%}" for cell in cells)
        write_line(f"| {questions} | {families} | {passes} | {figures} |")


def print_rare(replications: int) -> None:
    """Print coverage with a few very slow questions, and how often a run warns of them."""
    error = math.sqrt(0.95 * 0.05 / replications)
    write_line(f"rare, slow questions: {replications} replications, error {error:.2%} or more\n")
    write_line(
        "| slow | questions | spread | interval | holds | above | below | warned | unwarned holds |"
    )
    write_line("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    cases = (
        ("nowhere", 0.0, False, 0.0),
        ("the method", 0.02, False, 0.0),
        ("both alike", 0.02, True, 0.0),
        ("Student 2.5", 0.0, False, 2.5),
    )
    for (name, share, for_all, student), (questions, families), spread in itertools.product(
        cases, ((20, 5), (48, 6), (120, 6), (400, 6)), (0.25, 0.5)
    ):
        found = coverage_details(
            SimulationSettings(
                questions=questions,
                families=families,
                spread=spread,
                rare=share,
                rare_for_all=for_all,
                student=student,
            ),
            replications,
        )
        figures = (
            found.with_interval,
            found.covered / found.with_interval,
            found.above / found.with_interval,
            found.below / found.with_interval,
            found.warned,
            found.covered_unwarned,
        )
        cells = " | ".join(f"{figure:.1%}" for figure in figures)
        write_line(f"| {name} | {questions} | {spread} | {cells} |")


def print_groups(replications: int) -> None:
    """Print how often equal methods are found to differ."""
    replications //= 5
    error = math.sqrt(0.05 * 0.95 / replications)
    write_line(
        f"false differences among 12 equal methods: {replications} replications, error {error:.2%}"
    )
    write_line("\n| questions | families | processes | spread | letters | pair by pair |")
    write_line("| --- | --- | --- | --- | --- | --- |")
    for (questions, families, passes), spread in itertools.product(
        ((20, 5, 1), (48, 6, 1), (48, 6, 3), (120, 6, 1)), (0.1, 0.5)
    ):
        settings = SimulationSettings(
            questions=questions,
            families=families,
            passes=passes,
            spread=spread,
            common=0.25,
            process_spread=0.01 if passes > 1 else 0.0,
        )
        joint, pairwise = false_differences(settings, 12, replications)
        write_line(
            f"| {questions} | {families} | {passes} | {spread} | {joint:.1%} | {pairwise:.0%} |"
        )


def print_detectable(replications: int) -> None:
    """Print the smallest speedup ratios that can be detected."""
    write_line("detectable with power 80%, spread 0.25\n")
    write_line("| questions | 2 methods | 5 methods | 12 methods |")
    write_line("| --- | --- | --- | --- |")
    for questions in (12, 24, 48, 120, 480):
        found = [
            estimate_detectable_ratio(questions, methods, families=6) for methods in (2, 5, 12)
        ]
        write_line(
            f"| {questions} | " + " | ".join(f"{f:.2f}x" if f else "-" for f in found) + " |"
        )


TABLES = {
    "intervals": print_intervals,
    "rare": print_rare,
    "letters": print_groups,
    "differences": print_detectable,
}


def write_line(line: str) -> None:
    """Print a line and flush."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
