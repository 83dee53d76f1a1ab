"""SPACE: the decoding method and its mask token."""
