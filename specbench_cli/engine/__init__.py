"""Decoding engine: decoders, model states, verification and the decoding loop, for all methods."""
