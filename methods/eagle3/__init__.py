"""EAGLE-3: the method and its head."""
