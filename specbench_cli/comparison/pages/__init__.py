"""The outcome of a comparison, as each reader wants it."""
