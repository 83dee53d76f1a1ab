"""Simulate false alarm rates and detection rates of change points.

    python benchmarks/statistics/changes.py [REPLICATIONS]

The script prints the tables in docs/explanations/statistics.md.
"""

import sys

import numpy as np

from specbench_cli.stats.changes import find_level_shifts

ALPHAS = (0.01, 0.05)
RARE = 0.003
SIZES = (1, 2, 3, 5)


def false_alarms(rng, draw, alpha, replications):
    """Return the share of unchanged series in which a change is detected."""
    detected = (
        find_level_shifts(draw(rng), level=alpha, draws=499, seed=i) for i in range(replications)
    )
    return sum(map(bool, detected)) / replications


def detection_rate(rng, before, after, size, replications):
    """Return the share of series whose change is detected at most one run away."""
    hits = 0
    for i in range(replications):
        series = rng.normal(size=before + after)
        series[before:] += size
        detected = find_level_shifts(series, level=RARE, draws=999, seed=i)
        hits += any(abs(shift.index - before) <= 1 for shift in detected)
    return hits / replications


def main(replications):
    rng = np.random.default_rng(0)
    write_line("| runs | normal | t(3) | Cauchy |\n| --- | --- | --- | --- |")
    for n in (10, 20, 40):
        noises = (
            lambda rng, n=n: rng.normal(size=n),
            lambda rng, n=n: rng.standard_t(3, size=n),
            lambda rng, n=n: rng.standard_cauchy(size=n),
        )
        cells = (
            ", ".join(f"{false_alarms(rng, noise, a, replications):.1%}" for a in ALPHAS)
            for noise in noises
        )
        write_line(f"| {n} | {' | '.join(cells)} |")
    write_line(f"\n| runs before + after | {' | '.join(map(str, SIZES))} |\n| {'--- | ' * 5}")
    for before, after in ((20, 3), (20, 5), (20, 10), (40, 3), (40, 5)):
        cells = (
            f"{detection_rate(rng, before, after, s, 3 * replications // 10):.0%}" for s in SIZES
        )
        write_line(f"| {before} + {after} | {' | '.join(cells)} |")


def write_line(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
