"""Measurement of a run: loads models, decodes prompts, waits for a quiet machine, and reads machine
facts.
"""
