"""A repeat that is scheduled on the devices of several machines, which are reached by Ray."""
