"""Decoding methods. Each is one file or folder, and its code follows the steps of its paper.

The docstring of a method lists the steps. The engine carries out steps that are marked (engine),
and a base class those marked (base).
"""
