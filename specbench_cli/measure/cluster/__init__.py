"""Measurement of a run on the devices of several machines, through Ray (`--executor ray`)."""
