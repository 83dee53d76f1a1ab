"""Decoding engine: decoders, states, verification and the decoding loop, for all methods."""
