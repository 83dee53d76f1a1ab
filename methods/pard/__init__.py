"""PARD: the decoding method and its draft model."""
