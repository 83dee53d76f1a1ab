"""Self-test of the audit: every known fault must be caught by its check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specbench_cli.audit.finding import Finding
from specbench_cli.audit.runner import CHECKS, run_checks
from tests.audit.faults.planted import FAULTS, Fault

GIVEN_BY = {
    "acceptance": "distribution",
    "clock": "states",
    "counters": "states",
    "repeating text": "twin draft",
    "mixed draft": "twin draft",
    "useless draft": "twin draft",
    "caches": "model",
}
"""Pairs of checks of which the second also fails if the first does."""


@dataclass(frozen=True, slots=True)
class Caught:
    """Result of a known fault: the finding against it, or None."""

    fault: Fault
    finding: Finding | None

    @property
    def caught(self) -> bool:
        """True if the right check found the fault.

        A crash does not count, nor a case that the check could not examine.
        """
        return self.finding is not None and self.finding.shown and not self.finding.crashed

    def facts(self) -> dict[str, str]:
        """Return the fault's row for the printed table."""
        problem = self.finding.problem if self.finding else None
        return {
            "fault": self.fault.name,
            "caught by": (self.fault.by if self.caught else "NOT CAUGHT"),
            "by how much": problem.what if problem else "",
        }


def self_test(faults: Sequence[Fault] = FAULTS) -> Iterator[Caught]:
    """Plant one fault at a time, and run the check that must catch it."""
    for fault in faults:
        name = GIVEN_BY.get(fault.by, fault.by)
        with fault.planted():
            findings = run_checks(fault.subject, {name: CHECKS[name]})
        wrong = (
            found for found in findings if not found.passed and found.check in (fault.by, name)
        )
        mine = sorted(wrong, key=lambda found: found.check != fault.by)
        caught = mine[0] if mine and (mine[0].check == fault.by or mine[0].crashed) else None
        yield Caught(fault, caught)
