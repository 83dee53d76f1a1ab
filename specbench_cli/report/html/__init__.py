"""One self-contained page of a run, for a browser."""
