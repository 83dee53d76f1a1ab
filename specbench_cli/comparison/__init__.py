"""`specbench compare`: which results changed between two or more runs, and whether the check fails."""
