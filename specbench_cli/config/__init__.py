"""The settings of a run: their schema, where they come from, and which source wins."""
