"""Claimed and measured speedups: results from a method's paper next to those of this run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specbench_cli import registry
from specbench_cli.errors import UsageError
from specbench_cli.report.document import plain_cell
from specbench_cli.summary import formats, metrics
from specbench_cli.summary.columns import Column
from specbench_cli.summary.facts import Facts
from specbench_cli.summary.metrics import MethodSummary
from specbench_cli.summary.summary import Summary

if TYPE_CHECKING:
    from specbench_cli.api import Claim

TITLE = "Claimed and measured"
NOTE = (
    "Speedups depend on models, tasks and hardware. Compare the two set-ups before you compare the"
    " speedups."
)


@dataclass(frozen=True, slots=True)
class ClaimComparison:
    """A claim of a paper, with the result of the claimed method in this run.

    Attributes:
        row: Best result of the method in this run.
        run_setup: Models, tasks and device of this run.
    """

    row: MethodSummary
    claim: Claim
    run_setup: str


def _measured(line: ClaimComparison) -> str:
    row = line.row
    parts = (metrics.speedup_or_broken(row), metrics.interval(row), metrics.accuracy_note(row))
    return " ".join(word for word in parts if word not in ("", formats.NONE)) or formats.NONE


def _text_column(
    heading: str, format_line: Callable[[ClaimComparison], str]
) -> Column[ClaimComparison]:
    return Column(
        heading,
        align="l",
        format=format_line,
        data={heading: lambda line: plain_cell(format_line(line)).value},
        look=lambda line: plain_cell(format_line(line)).look,
    )


METHOD, CLAIMED, SET_UP, SOURCE, MEASURED, HERE = COLUMNS = (
    _text_column("method", lambda line: line.row.label),
    _text_column("claimed", lambda line: line.claim.speedup),
    _text_column("set-up of the source", lambda line: format_setup(line.claim)),
    _text_column("read in", lambda line: line.claim.source),
    _text_column("measured", _measured),
    _text_column("set-up here", lambda line: line.run_setup),
)


def compare_claims(summary: Summary, facts: Facts) -> list[ClaimComparison]:
    """Return the claims about the measured methods, each with the method's best result
    in this run.
    """
    best: dict[str, MethodSummary] = {}
    for row in summary.rows:
        current, is_ranked = best.get(row.method), not (row.upper_bound or row.control)
        if is_ranked and (current is None or (row.speedup or 0) > (current.speedup or 0)):
            best[row.method] = row
    run_setup = _describe_run(summary, facts)
    return [
        ClaimComparison(row, claim, run_setup)
        for name, row in best.items()
        for papers in find_papers(name)
        for claim in papers.claims
    ]


def find_papers(name: str) -> Iterator[registry.Papers]:
    """Yield the papers of a method. Yield nothing if the method is not installed here."""
    try:
        yield registry.papers(name)
    except UsageError:
        return


def format_setup(claim: Claim) -> str:
    """Return models, task, temperature and hardware of a claim, if the paper reports them."""
    temperature = None if claim.temperature is None else f"T={claim.temperature:g}"
    return ", ".join(
        word for word in (claim.models, claim.task, temperature, claim.hardware) if word
    )


def _describe_run(summary: Summary, facts: Facts) -> str:
    models: Sequence[str] = [facts.target, *([f"draft {facts.draft}"] if facts.draft else [])]
    where = facts.device if facts.device not in ("", "auto") else ""
    parts = [*models, *summary.prompts, f"{facts.decoding} {facts.dtype}", where]
    return ", ".join(filter(None, parts))
