"""EAGLE: the decoding method and its draft head."""
