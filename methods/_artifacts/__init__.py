"""Trained modules and stores that methods ask for and that draft nothing themselves."""
