"""Measurement of a run: loading of models, decoding of prompts, noise detection, machine facts."""
