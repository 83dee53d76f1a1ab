"""Modes of `specbench predict`: probe, roofline model, load, and other settings."""
