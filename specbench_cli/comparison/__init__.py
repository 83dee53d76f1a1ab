"""Comparison of two or more runs: what changed, and whether the gate fails."""
