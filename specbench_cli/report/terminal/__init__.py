"""What a person at a terminal reads of a run."""
