"""Modules that say all tokens of a draft in one forward, from mask tokens."""
