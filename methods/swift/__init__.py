"""SWIFT: the decoding method, and its search for the sublayers to skip."""
