"""Models: decoders, their states (such as KV caches), model loading and time measurement."""
