"""Audits of capabilities are short ones."""

import pytest


@pytest.fixture(autouse=True)
def _short(short_audit):
    pass
