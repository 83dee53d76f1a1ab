"""Decoding segment by segment, for methods such as SpecReason and Speculative Thinking.

A segment is a reasoning step, a line or another chunk of text. One model writes the segment, and
the method accepts or rejects it as a whole.
"""
