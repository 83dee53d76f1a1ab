"""SPACE: the method and its mask token."""
