"""EAGLE: the method and its head."""
