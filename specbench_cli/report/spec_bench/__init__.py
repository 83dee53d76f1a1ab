"""Spec-Bench beside ours: the figures of its formulas, and its answer files."""
