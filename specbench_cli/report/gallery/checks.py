"""Checks before a run is published in a gallery: complete, correct and without noisy times."""

from __future__ import annotations

from collections.abc import Iterator

from specbench_cli.errors import BadAnswer, EnvironmentFault, SpecbenchError, UsageError
from specbench_cli.report.html.facts import hide_paths
from specbench_cli.report.report_data import ReportData
from specbench_cli.store.schema import BASELINE
from specbench_cli.summary import metrics, text
from specbench_cli.summary.metrics import MethodSummary

RERUN_HINT = "specbench run, on a quiet machine"


def check_publishable(data: ReportData) -> None:
    """Check that a run can be published.

    Raises:
        BadAnswer: A method is broken, or some of its outputs failed.
        EnvironmentFault: Times are noisy.
        UsageError: The run is not finished, was changed, has incompatible parts, or has no speedup.
    """
    for reasons in (_records, _answers, _kind, _times, _proof):
        if (fault := next(reasons(data), None)) is not None:
            raise fault


def _explain(data: ReportData, why: str, hint: str) -> tuple[str, str]:
    return f"{hide_paths(data.name)} is not published: {why}", hint


def _records(data: ReportData) -> Iterator[SpecbenchError]:
    """Yield an error if another program changed the files of the run."""
    if "spoiled" in data.run.manifest:
        program = hide_paths(str(data.run.manifest["spoiled"]))
        yield UsageError(
            *_explain(data, f"{program} wrote to its files", "specbench run, without it")
        )


def _answers(data: ReportData) -> Iterator[SpecbenchError]:
    """Yield an error for each method with wrong or failed outputs, other engines excluded."""
    ours, report_hint = _own_methods(data), f"specbench report {data.report_arguments}"
    for row in ours:
        if row.broken:
            yield BadAnswer(
                *_explain(data, f"{row.label} is BROKEN: {row.broken_why}", report_hint)
            )
    for row in ours:
        if row.failed:
            yield BadAnswer(
                *_explain(data, f"{row.failed} outputs of {row.label} failed", report_hint)
            )


def _kind(data: ReportData) -> Iterator[SpecbenchError]:
    """Yield an error unless this is a single finished run of one program version on real models."""
    facts = data.facts
    if facts.status != "finished":
        finish = f"specbench run --resume {data.report_arguments}"
        yield UsageError(*_explain(data, f"it is {facts.status}, not finished", finish))
    if facts.forced:
        differences = "; ".join(facts.forced)
        yield UsageError(
            *_explain(data, f"it is forced: runs that differ in {differences}", RERUN_HINT)
        )
    if facts.targets:
        one = f"specbench publish {data.sources[0].path}"
        yield UsageError(*_explain(data, "it is of several targets: publish its runs", one))
    if facts.mixed:
        differences = ", ".join(facts.mixed)
        yield UsageError(
            *_explain(data, f"it is mixed: {differences} changed while it ran", RERUN_HINT)
        )
    if facts.synthetic:
        yield UsageError(*_explain(data, f"it is synthetic: {facts.synthetic}", "a real --target"))


def _times(data: ReportData) -> Iterator[SpecbenchError]:
    """Yield an error if times are noisy."""
    if data.facts.noisy:
        why = "other programs were running, and its times were kept"
        yield EnvironmentFault(*_explain(data, why, RERUN_HINT))
    for row in _own_methods(data):
        if row.n_void and row.speedup is None:
            why = f"{row.n_void} of {row.n_cells} times of {row.label} are noisy"
            yield EnvironmentFault(*_explain(data, why, RERUN_HINT))


def _proof(data: ReportData) -> Iterator[SpecbenchError]:
    """Yield an error if a run does not show the speed of its methods.

    This is the case if outputs were not decoded freely but replayed, if no method has a speedup, or
    if the machine is not recorded.
    """
    summary = data.summary
    if any(row.sampling == metrics.REPLAY for row in summary.rows):
        yield UsageError(*_explain(data, text.proof(summary), "specbench run --verify greedy"))
    if all(row.speedup is None for row in summary.rows if row.label != BASELINE):
        why = f"no method has a speedup over {BASELINE}"
        yield UsageError(*_explain(data, why, f"specbench report {data.report_arguments}"))
    if not (data.run.manifest.get("machine") or {}).get("id"):
        yield UsageError(*_explain(data, "its machine is not recorded", RERUN_HINT))


def _own_methods(data: ReportData) -> list[MethodSummary]:
    return [row for row in data.summary.rows if not row.peer]
