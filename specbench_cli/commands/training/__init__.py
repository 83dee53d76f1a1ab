"""`specbench train` and its commands."""
