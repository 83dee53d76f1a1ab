"""Medusa: the method and its heads."""
