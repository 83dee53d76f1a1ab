"""Synthetic runs, as in the tests of reports."""

from tests.report.conftest import synthetic

__all__ = ["synthetic"]
