"""Verdicts on outputs (identical, near-tie or mismatch), and detection of broken methods."""
