"""Multi-token prediction: the method and its head."""
