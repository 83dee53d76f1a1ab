"""`specbench recommend`: search for the fastest method, then confirm it on held-out prompts."""
