"""Judge Decoding: the decoding method and its trained head."""
