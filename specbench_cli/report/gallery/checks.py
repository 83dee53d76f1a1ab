"""Reasons not to publish a run in a gallery: its figures or its proof cannot be trusted."""

from __future__ import annotations

from collections.abc import Iterator

from specbench_cli.errors import BadAnswer, EnvironmentFault, SpecbenchError, UsageError
from specbench_cli.report.html.facts import hide_paths
from specbench_cli.report.report_data import ReportData
from specbench_cli.store.schema import BASELINE
from specbench_cli.summary import metrics, text
from specbench_cli.summary.metrics import MethodSummary

AGAIN = "specbench run, on a quiet machine"


def check_publishable(reading: ReportData) -> None:
    """Raise the most serious reason not to publish a run, if there is one.

    Raises:
        BadAnswer: a method is broken, or outputs are missing.
        EnvironmentFault: times are noisy.
        UsageError: the run is unfinished, mixed, forced or spoiled, or it compares nothing.
    """
    for reasons in (_records, _answers, _kind, _times, _proof):
        if (fault := next(reasons(reading), None)) is not None:
            raise fault


def _reason(reading: ReportData, why: str, hint: str) -> tuple[str, str]:
    return f"{hide_paths(reading.name)} is not published: {why}", hint


def _records(reading: ReportData) -> Iterator[SpecbenchError]:
    """Yield an error if records were changed by another program."""
    if "spoiled" in reading.run.manifest:
        who = hide_paths(str(reading.run.manifest["spoiled"]))
        yield UsageError(
            *_reason(reading, f"{who} wrote to its files", "specbench run, without it")
        )


def _answers(reading: ReportData) -> Iterator[SpecbenchError]:
    """Yield an error for each broken or incomplete method. Peers are measured, but not judged."""
    ours, show = _ours(reading), f"specbench report {reading.report_arguments}"
    for row in ours:
        if row.broken:
            yield BadAnswer(*_reason(reading, f"{row.label} is BROKEN: {row.broken_why}", show))
    for row in ours:
        if row.failed:
            yield BadAnswer(*_reason(reading, f"{row.failed} outputs of {row.label} failed", show))


def _kind(reading: ReportData) -> Iterator[SpecbenchError]:
    """Yield an error unless this is one finished run, of one program version and on real models."""
    facts = reading.facts
    if facts.status != "finished":
        finish = f"specbench run --resume {reading.report_arguments}"
        yield UsageError(*_reason(reading, f"it is {facts.status}, not finished", finish))
    if facts.forced:
        what = "; ".join(facts.forced)
        yield UsageError(*_reason(reading, f"it is forced: runs that differ in {what}", AGAIN))
    if facts.targets:
        one = f"specbench publish {reading.sources[0].path}"
        yield UsageError(*_reason(reading, "it is of several targets: publish its runs", one))
    if facts.mixed:
        what = ", ".join(facts.mixed)
        yield UsageError(*_reason(reading, f"it is mixed: {what} changed while it ran", AGAIN))
    if facts.synthetic:
        yield UsageError(
            *_reason(reading, f"it is synthetic: {facts.synthetic}", "a real --target")
        )


def _times(reading: ReportData) -> Iterator[SpecbenchError]:
    """Yield an error if times are noisy."""
    if reading.facts.noisy:
        why = "other programs were running, and its times were kept"
        yield EnvironmentFault(*_reason(reading, why, AGAIN))
    for row in _ours(reading):
        if row.n_void and row.speedup is None:
            why = f"{row.n_void} of {row.n_cells} times of {row.label} are void"
            yield EnvironmentFault(*_reason(reading, why, AGAIN))


def _proof(reading: ReportData) -> Iterator[SpecbenchError]:
    """Yield an error if the run compares nothing."""
    summary = reading.summary
    if any(row.sampling == metrics.REPLAY for row in summary.rows):
        yield UsageError(*_reason(reading, text.proof(summary), "specbench run --verify greedy"))
    if all(row.speedup is None for row in summary.rows if row.label != BASELINE):
        why = f"no method has a speedup over {BASELINE}"
        yield UsageError(*_reason(reading, why, f"specbench report {reading.report_arguments}"))
    if not (reading.run.manifest.get("machine") or {}).get("id"):
        yield UsageError(*_reason(reading, "its machine is not recorded", AGAIN))


def _ours(reading: ReportData) -> list[MethodSummary]:
    return [row for row in reading.summary.rows if not row.peer]
