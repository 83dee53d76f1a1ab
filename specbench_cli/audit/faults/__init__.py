"""Planted faults: real methods and real functions of the engine with one thing wrong."""
