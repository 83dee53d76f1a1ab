"""Models: decoders, what they remember, and how they are loaded and metered."""
