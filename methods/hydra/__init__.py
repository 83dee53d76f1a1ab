"""Hydra: the method and its heads."""
