"""The measurement of a run: loading models, decoding prompts, quiet windows, machine facts."""
