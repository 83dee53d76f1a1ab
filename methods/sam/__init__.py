"""SAM-Decoding: the decoding method and its suffix automaton."""
