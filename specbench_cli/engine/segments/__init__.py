"""Texts that a draft model and the target write segment by segment.

A segment is a reasoning step or a chunk of text that one model writes and another judges as a
whole.
"""
