"""Chimera: the method and its head."""
