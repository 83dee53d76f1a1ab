"""Texts that two models write span by span: where spans end, who writes and keeps them, who pays.

A span is what one model writes and another judges as a whole: a step of a reasoning, a chunk.
"""
