"""The trainer of draft heads."""
