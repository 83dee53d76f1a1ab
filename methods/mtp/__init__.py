"""Multi-token prediction: the decoding method and its draft head."""
