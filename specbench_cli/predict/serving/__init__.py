"""A method and its settings in the words of engines that serve models."""
