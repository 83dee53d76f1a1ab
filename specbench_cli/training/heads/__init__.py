"""Training of draft heads, exit predictors and judges."""
