"""Workers that run a method's draft model in parallel with the target."""
