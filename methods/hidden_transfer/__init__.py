"""Hidden Transfer: the method and its maps."""
