"""Staged speculative decoding: the decoding method and its n-gram model."""
