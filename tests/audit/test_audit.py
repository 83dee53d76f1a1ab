"""Audits of several methods at once."""

import pytest

from specbench_cli.audit import runner as module


@pytest.mark.long
def test_methods_are_audited_in_processes_of_their_own(monkeypatch):
    monkeypatch.setattr(module, "usable_cpus", lambda: 2)
    found = {c.method: c for c in module.audit_all(["hf:vanilla", "hf:prompt-lookup"])}
    assert {name: c.verdict for name, c in found.items()} == {
        "hf:vanilla": "AGREES",
        "hf:prompt-lookup": "AGREES",
    }
    assert all(c.seconds > 0 and c.passed for c in found.values())


def test_one_cpu_needs_no_process(monkeypatch):
    monkeypatch.setattr(module, "usable_cpus", lambda: 1)
    monkeypatch.setattr(module, "audit", lambda name, plugins: (name, plugins))
    assert list(module.audit_all(["a", "b"], ["file.py"])) == [
        ("a", ["file.py"]),
        ("b", ["file.py"]),
    ]
