"""Drafting: operations that several methods use to draft tokens."""
