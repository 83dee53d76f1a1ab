"""Metrics of a run, from its records: rows, ratios, intervals and significance groups."""
