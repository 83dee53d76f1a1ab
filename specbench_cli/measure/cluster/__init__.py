"""Scheduling of a repeat on the devices of several machines, through Ray."""
