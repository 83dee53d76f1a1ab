"""Simulates what intervals and letters are worth: the figures of docs/explanations/statistics.md.

python benchmarks/statistics/simulated_intervals.py [replications [TABLE ...]]

TABLE: intervals, rare, letters, differences; default: all.
"""

from __future__ import annotations

import itertools
import math
import sys

from specbench_cli.stats.detectable import detectable
from specbench_cli.stats.simulated import (
    Setting,
    coverage,
    coverage_details,
    false_differences,
)


def main() -> None:
    """Print the tables, as Markdown."""
    replications = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    for table in sys.argv[2:] or TABLES:
        TABLES[table](replications)


def intervals(replications: int) -> None:
    """How often intervals hold the truth."""
    error = math.sqrt(0.95 * 0.05 / replications)
    say(f"coverage of 95% intervals: {replications} replications, error {error:.2%}\n")
    say("| questions | families | processes | both 0.5 | speedups 1 | times 1 | both 1 |")
    say("| --- | --- | --- | --- | --- | --- | --- |")
    for (questions, families), passes in itertools.product(((20, 1), (20, 5), (48, 6)), (1, 3)):
        cells = [
            coverage(
                Setting(
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
        say(f"| {questions} | {families} | {passes} | {figures} |")


def rare(replications: int) -> None:
    """Print coverage with a few very slow questions, and how often a run warns of them."""
    error = math.sqrt(0.95 * 0.05 / replications)
    say(f"rare, slow questions: {replications} replications, error {error:.2%} or more\n")
    say(
        "| slow | questions | spread | interval | holds | above | below | warned | unwarned holds |"
    )
    say("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
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
            Setting(
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
        say(f"| {name} | {questions} | {spread} | {cells} |")


def letters(replications: int) -> None:
    """How often equal methods are told apart."""
    replications //= 5
    error = math.sqrt(0.05 * 0.95 / replications)
    say(f"false differences among 12 equal methods: {replications} replications, error {error:.2%}")
    say("\n| questions | families | processes | spread | letters | pair by pair |")
    say("| --- | --- | --- | --- | --- | --- |")
    for (questions, families, passes), spread in itertools.product(
        ((20, 5, 1), (48, 6, 1), (48, 6, 3), (120, 6, 1)), (0.1, 0.5)
    ):
        setting = Setting(
            questions=questions,
            families=families,
            passes=passes,
            spread=spread,
            common=0.25,
            process_spread=0.01 if passes > 1 else 0.0,
        )
        together, alone = false_differences(setting, 12, replications)
        say(f"| {questions} | {families} | {passes} | {spread} | {together:.1%} | {alone:.0%} |")


def differences(replications: int) -> None:
    """What can be detected."""
    say("detectable with power 80%, spread 0.25\n")
    say("| questions | 2 methods | 5 methods | 12 methods |")
    say("| --- | --- | --- | --- |")
    for questions in (12, 24, 48, 120, 480):
        found = [detectable(questions, methods, families=6) for methods in (2, 5, 12)]
        say(f"| {questions} | " + " | ".join(f"{f:.2f}x" if f else "-" for f in found) + " |")


TABLES = {"intervals": intervals, "rare": rare, "letters": letters, "differences": differences}


def say(line: str) -> None:
    """A line of the report, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
