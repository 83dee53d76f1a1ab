"""Measures which speculative-decoding method is fastest here, and if its output is unchanged."""

__version__ = "0.1.0"
