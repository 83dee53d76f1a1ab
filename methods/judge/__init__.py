"""Judge decoding: the method and its head."""
