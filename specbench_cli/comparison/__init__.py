"""Two runs, or many: what changed between them, and whether a gate should close."""
