"""Hidden Transfer: the decoding method and its trained maps."""
