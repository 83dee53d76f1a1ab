"""Verdicts on measured outputs: identical, near-tie or mismatch, and which methods are broken."""
