"""SWIFT: the method and its search for sublayers to skip."""
