"""Workers that draft in parallel with the target."""
