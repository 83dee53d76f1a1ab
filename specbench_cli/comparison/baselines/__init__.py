"""Baselines: files with the results of a run, which later runs are compared with."""
