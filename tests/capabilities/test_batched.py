"""Batched drafting: one draft forward for several sequences, and its audit."""

from pathlib import Path

import pytest

from specbench_cli import registry, skeletons
from specbench_cli.audit.models.tiny import create_tiny_models
from specbench_cli.audit.runner import CHECKS, run_checks
from specbench_cli.audit.subject import AuditSubject
from specbench_cli.engine.batch import Batch
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.verify.sampling import Sampling

FILE = Path(skeletons.__file__).with_name("batch.py")


@pytest.fixture(scope="module")
def batched():
    registry.load_plugin(str(FILE))
    return registry.load("skeleton-batch")


def test_it_passes_the_audit(batched):
    wrong = [
        each
        for each in run_checks(AuditSubject.from_method("skeleton-batch", batched), CHECKS)
        if not each.passed
    ]
    assert not wrong


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_drafts_of_all_sequences_take_one_forward_per_token(batched, rule):
    models = create_tiny_models()
    sampling = Sampling() if rule == "greedy" else Sampling("coupled", 0.8)
    requests = [
        Request(f"tiny/{at}", 0, models.prompts[at], StopRule(frozenset(), 5 + 3 * at))
        for at in range(4)
    ]
    batch = Batch(models.workspace, requests, sampling)
    steps = [step.seq for step in batched().generate_batch(batch)]
    rounds = max(steps.count(at) for at in range(4))
    forwards = batch.meter.forwards
    assert sum(f.role == "verify" for f in forwards) == rounds
    assert sum(f.role == "draft" and f.batch > 1 for f in forwards) > 0
    assert sum(f.model == "draft" for f in forwards) <= rounds * 4 + 1
