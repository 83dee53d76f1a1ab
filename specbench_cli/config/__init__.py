"""Settings of a run and options of commands: their schema, sources and checks."""
