"""Fixtures of the capability tests: their audits are short."""

import pytest


@pytest.fixture(autouse=True)
def _short(short_audit):
    pass
