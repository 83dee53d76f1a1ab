"""Each planted fault is caught by the check for it."""

from contextlib import nullcontext

import pytest
import torch

from methods.sps import Sps, SpsParams
from specbench_cli import registry
from specbench_cli.audit.certificate import certify
from specbench_cli.audit.checks import distribution as checks_distribution
from specbench_cli.audit.finding import Finding, Problem
from specbench_cli.audit.subject import AuditSubject
from specbench_cli.testing import few_cases
from tests.audit.faults.planted import FAULTS, Fault
from tests.audit.faults.selftest import self_test

RARE = {
    "bonus from the unwarped distribution",
    "bonus from a residual",
    "drafted rows of a head kept",
    "a prepared window that ends with the likeliest token",
    "drawn from the whole distribution, q of the top 50",
    "q of a tree's last level mixed up",
    "residual of the first 1,024 tokens",
    "q 10% wrong from the third token on, drawn twice",
    "ties cut off by top-k",
}
"""Faults that show only in few outcomes or in large vocabularies."""


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught_by_its_check(fault, monkeypatch):
    monkeypatch.setattr(checks_distribution, "OUTCOME_BUDGET", {"rejection": 800})
    monkeypatch.setattr(checks_distribution, "DEEP_BUDGET", {"rejection": 400})
    with nullcontext() if fault.name in RARE else few_cases():
        (caught,) = self_test([fault])
    assert caught.caught, caught.finding
    facts = caught.facts()
    assert facts["caught by"] == fault.by
    assert facts["by how much"]
    assert caught.finding.problem.where


@pytest.mark.usefixtures("short_audit")
def test_without_a_planted_fault_no_fault_is_reported():
    """Run each fault's check without the fault. test_checks.py runs all other checks."""
    (caught,) = self_test(
        [Fault("none", "tokens", AuditSubject("sps", Sps, (SpsParams(length=2),)))]
    )
    assert not caught.caught
    assert caught.facts()["caught by"] == "NOT CAUGHT"


def test_there_are_more_than_ninety_faults_with_distinct_names():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 90


def test_a_crash_counts_as_no_catch():
    class Crashes(registry.load("sps")):
        def propose(self, session, limit):
            raise KeyError("lost")

    subject = AuditSubject.from_method("sps", Crashes)
    (caught,) = self_test([Fault("crash", "tokens", subject)])
    assert not caught.caught
    assert caught.finding.crashed
    assert "KeyError" in caught.finding.problem.what
    assert caught.finding.problem.where.startswith("test_faults.py:")


@pytest.mark.usefixtures("short_audit")
def test_a_fault_without_an_examined_case_is_not_caught(monkeypatch):
    """Use a method that draws so often that no case has few outcomes. Its output is correct."""

    class Gambles(registry.load("sps")):
        def propose(self, session, limit):
            for _ in range(4 if session.sampling.draws else 0):
                session.random.categorical(torch.full((4,), 0.25))
            return super().propose(session, limit)

    monkeypatch.setattr(checks_distribution, "OUTCOME_BUDGET", {"rejection": 800})
    monkeypatch.setattr(checks_distribution, "MAX_OUTCOMES", 60)
    subject = AuditSubject("sps", Gambles, (SpsParams(length=2),))
    (caught,) = self_test([Fault("gambles", "distribution", subject)])
    assert not caught.caught
    assert not caught.finding.shown and not caught.finding.crashed
    assert caught.facts()["caught by"] == "NOT CAUGHT"
    assert "not shown under rejection: " in caught.facts()["by how much"]
    certificate = certify(subject, [caught.finding], 1.0)
    assert (certificate.verdict, certificate.passed) == ("NOT SHOWN", False)
    worse = Finding("states", False, {}, Problem("what", "where", "look"))
    assert certify(subject, [caught.finding, worse], 1.0).verdict == "FAULTY"
