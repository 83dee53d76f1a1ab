"""Commands of `specbench`, one module each. A command checks options and returns an exit code."""
