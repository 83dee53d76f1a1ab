"""SpecDec++: the decoding method and its acceptance head."""
