"""Predictions of decode times from a recorded run: for another machine, accelerator or load."""
