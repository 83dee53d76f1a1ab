"""Falcon: the method, its head and its decoding tree."""
