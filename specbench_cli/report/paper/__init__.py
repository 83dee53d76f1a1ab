"""What a paper takes from a run: LaTeX, references, and how it was measured."""
