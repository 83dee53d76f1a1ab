"""EAGLE-3: the decoding method and its draft head."""
