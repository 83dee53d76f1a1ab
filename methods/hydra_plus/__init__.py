"""Hydra++: the method and its head."""
