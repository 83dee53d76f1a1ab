"""Spec-Bench compatibility: results by its formulas, and its answer files."""
