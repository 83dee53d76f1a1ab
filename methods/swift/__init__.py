"""SWIFT: the method and its search for the sublayers to skip."""
