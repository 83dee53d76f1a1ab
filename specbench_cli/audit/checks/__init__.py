"""Checks of the audit, one per module, with shared helpers."""
