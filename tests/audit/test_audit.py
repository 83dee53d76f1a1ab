"""Tests of audits of several methods in one command."""

import pytest

from specbench_cli.audit import runner as module


@pytest.mark.long
def test_each_method_is_audited_in_its_own_process(monkeypatch):
    monkeypatch.setattr(module, "usable_cpus", lambda: 2)
    audited = module.audit_all(["hf:vanilla", "hf:prompt-lookup"])
    certificates = {certificate.method: certificate for certificate in audited}
    assert {name: each.verdict for name, each in certificates.items()} == {
        "hf:vanilla": "AGREES",
        "hf:prompt-lookup": "AGREES",
    }
    assert all(each.seconds > 0 and each.passed for each in certificates.values())


def test_with_one_cpu_audits_run_in_this_process(monkeypatch):
    monkeypatch.setattr(module, "usable_cpus", lambda: 1)
    monkeypatch.setattr(module, "audit", lambda name, plugins: (name, plugins))
    assert list(module.audit_all(["a", "b"], ["file.py"])) == [
        ("a", ["file.py"]),
        ("b", ["file.py"]),
    ]
