"""Trained draft heads and predictors.

Methods decode with them, and training commands train them.
"""
