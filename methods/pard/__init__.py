"""PARD: the method and its draft model."""
