"""One thin file a command: options in, a call, an exit code out."""
