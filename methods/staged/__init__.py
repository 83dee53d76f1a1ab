"""Staged speculative decoding: the method and its n-gram model."""
