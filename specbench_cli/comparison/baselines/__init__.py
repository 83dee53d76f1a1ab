"""Baselines: the results of a run, in a file of their own, that later runs are compared with."""
