"""Hydra++: the decoding method and its draft heads."""
