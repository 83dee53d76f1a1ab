"""Falcon: the decoding method and its draft head."""
