"""Studies that compare heads and measure how acceptance grows with training and size."""
