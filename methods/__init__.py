"""Decoding methods. Each method is one file or folder, and its code follows the steps of its paper.

The docstring of a method lists the steps. The engine carries out the steps with the mark (engine).
A base class carries out the steps with the mark (base).
"""
