"""Decoding: decoders, states, verification, the loop. It knows no single method."""
