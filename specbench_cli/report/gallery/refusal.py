"""Which runs no gallery takes: those whose figures or whose proof do not stand."""

from __future__ import annotations

from collections.abc import Iterator

from specbench_cli.errors import BadAnswer, EnvironmentFault, SpecbenchError, UsageError
from specbench_cli.report.html.facts import public
from specbench_cli.report.numbers.speedups import BASELINE
from specbench_cli.report.reading import Reading
from specbench_cli.report.terminal import text


def refuse(reading: Reading) -> None:
    """Raise for the gravest of what stands against publishing a run, if there is anything.

    Raises:
        BadAnswer: a row is broken, or outputs are missing.
        EnvironmentFault: times are void, or were taken beside other programs.
        UsageError: the run is not finished, or mixed, forced or spoiled, or proves nothing.
    """
    fault = next(_faults(reading), None)
    if fault is not None:
        raise fault


def _faults(reading: Reading) -> Iterator[SpecbenchError]:
    """What stands against it, the gravest first."""
    run, summary, facts = public(reading.name), reading.summary, reading.facts
    again = "specbench run, on a quiet machine"

    def not_published(why: str, hint: str) -> tuple[str, str]:
        return f"{run} is not published: {why}", hint

    show = f"specbench report {reading.where}"
    if not reading.records:
        yield UsageError(*not_published("its records are not kept", "give the run's whole folder"))
    if "spoiled" in reading.run.manifest:
        who = public(str(reading.run.manifest["spoiled"]))
        yield UsageError(*not_published(f"{who} wrote to its files", "specbench run, without it"))
    # A peer is measured, not judged: what it answers breaks no run.
    ours = [row for row in summary.rows if not row.peer]
    for row in ours:
        if row.broken:
            yield BadAnswer(*not_published(f"{row.label} is BROKEN: {row.broken_why}", show))
    for row in ours:
        if row.failed:
            yield BadAnswer(*not_published(f"{row.failed} outputs of {row.label} failed", show))
    if facts.status != "finished":
        finish = f"specbench run --resume {reading.where}"
        yield UsageError(*not_published(f"it is {facts.status}, not finished", finish))
    if facts.forced:
        what = "; ".join(facts.forced)
        yield UsageError(*not_published(f"it is forced: runs that differ in {what}", again))
    if facts.targets:
        one = f"specbench publish {reading.sources[0].path}"
        yield UsageError(*not_published("it is of several targets: publish its runs", one))
    if facts.mixed:
        what = ", ".join(facts.mixed)
        yield UsageError(*not_published(f"it is mixed: {what} changed while it ran", again))
    if facts.synthetic:
        yield UsageError(*not_published(f"it is synthetic: {facts.synthetic}", "a real --target"))
    if facts.noisy:
        yield EnvironmentFault(
            *not_published("other programs were running, and its times were kept", again)
        )
    for row in ours:
        if row.n_void and row.speedup is None:
            why = f"{row.n_void} of {row.n_cells} times of {row.label} are void"
            yield EnvironmentFault(*not_published(why, again))
    if any(row.sampling == text.REPLAY for row in summary.rows):
        yield UsageError(*not_published(text.proof(summary), "specbench run --verify greedy"))
    if all(row.speedup is None for row in summary.rows if row.label != BASELINE):
        yield UsageError(*not_published(f"no row of it has a speedup over {BASELINE}", show))
    if not (reading.run.manifest.get("machine") or {}).get("id"):
        yield UsageError(*not_published("it does not say on which machine it ran", again))
