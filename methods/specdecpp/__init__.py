"""SpecDec++: the method and its acceptance head."""
