"""Clover: the method and its head."""
