"""One thin file a command: options in, a call, an exit code out."""

OUTPUT = "Output"
"""The panel of each command's help that says what comes out, where and in which form."""

OVERWRITE = "Replace files that specbench did not write."
"""Help text of `--overwrite`."""
