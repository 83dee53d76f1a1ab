"""A run replayed on accelerators that are not here: modelled, with its sensitivity."""
