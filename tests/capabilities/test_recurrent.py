"""Recurrent states and targets that are not dense decoders: a plug-in of forty lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specbench_cli import registry
from specbench_cli.audit.runner import audit
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace

PLUGIN = Path(__file__).parent / "plugins" / "recurrent.py"


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_plugin_methods", {})


def test_it_passes_the_audit_on_states_of_both_kinds() -> None:
    certificate = audit("checked-lookup", [str(PLUGIN)])
    checks = {finding.check: finding for finding in certificate.findings}
    assert certificate.verdict == "PASSED", certificate.findings
    assert checks["recurrent"].figure["decodings"] > 0
    assert checks["recurrent"].figure["refused"] == 0


@pytest.mark.parametrize(
    ("target", "draft"),
    [("mamba2", "mamba2"), ("llama", "mamba2"), ("mamba2", "gpt2"), ("t5", "t5")],
)
def test_it_is_lossless_and_accepted(
    tiny_checkpoint: Callable[..., Path], target: str, draft: str
) -> None:
    registry.load_plugin(str(PLUGIN))
    decoders = {
        "target": load_decoder(tiny_checkpoint(target), name="target"),
        "draft": load_decoder(tiny_checkpoint(draft, noise=0.1), name="draft"),
    }
    workspace, accepted = Workspace(decoders, 96), 0
    for n in (4, 9, 17):
        ids = torch.randint(2, 20, (n,), generator=torch.Generator().manual_seed(n)).tolist()
        stop = StopRule(frozenset(), 24)
        request = Request.create(decoders["target"], f"{n}", 1, [*ids, *ids], stop)
        outputs = []
        for name in ("vanilla", "checked-lookup"):
            session = Session(workspace, request, Sampling())
            steps = list(registry.build(name, {}).generate(session))
            outputs.append(list(session.output()))
        assert outputs[0] == outputs[1]
        accepted += sum(len(step.outcome.path) for step in steps)
    assert accepted > 0 or target != draft
