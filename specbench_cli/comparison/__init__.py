"""`specbench compare`: what changed between two or more runs, and whether the check (gate)
fails."""
