"""Other engines: how they are asked to decode, and what they tell of it."""
