"""Medusa: the decoding method and its draft heads."""
