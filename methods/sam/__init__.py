"""SAM-Decoding: the method and its suffix automaton."""
