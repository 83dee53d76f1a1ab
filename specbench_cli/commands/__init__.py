"""Commands of `specbench`, one module each: parse options, call code, return an exit code."""
