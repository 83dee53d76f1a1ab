"""`specbench compare`: which results changed between two or more runs, and if the check fails."""
