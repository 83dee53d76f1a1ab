"""Embedded family: its training, and what its models can do."""
