"""Trained modules that methods share with the commands that train them."""
