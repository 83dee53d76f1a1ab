"""Drawing of all figures: common style, three plot kinds, and label placement."""
