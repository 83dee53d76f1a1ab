"""Audits of capabilities: the shipped pair is sampled for few tokens."""

import pytest

from specbench_cli.audit.checks import embedded


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch):
    monkeypatch.setattr(embedded, "TOKENS", 80)
