"""Recommendation of a method: successive halving of candidates, confirmed on held-out prompts."""
