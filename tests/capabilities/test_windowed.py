"""States that keep selected rows, whose positions differ from their indices."""

from pathlib import Path

import pytest

from specbench_cli import registry
from specbench_cli.audit.models.tiny import MAX_TOKENS, create_tiny_models
from specbench_cli.audit.runner import CHECKS, run_checks
from specbench_cli.audit.subject import AuditSubject
from specbench_cli.engine.verify.sampling import Sampling

FILE = Path(__file__).parent / "plugins" / "windowed.py"


@pytest.fixture(scope="module")
def windowed():
    registry.load_plugin(str(FILE))
    return registry.load("windowed")


def test_it_passes_the_audit(windowed):
    subject = AuditSubject.from_method("windowed", windowed)
    wrong = [each for each in run_checks(subject, CHECKS) if not each.passed]
    assert not wrong


def test_its_draft_keeps_few_rows_and_the_output_is_vanillas(windowed):
    models = create_tiny_models()
    for prompt, due in models.outputs_without_ties(Sampling()):
        session = models.open(prompt, Sampling())
        method = windowed()
        for _ in method.generate(session):
            assert method.state.length() <= 1 + 4 + 3 + 1
        assert list(session.output()) == due[:MAX_TOKENS]
        assert method.state.position() >= len(session.tokens()) - 5
