"""Drawing of all figures: one look, three plot kinds, and text that finds its place."""
