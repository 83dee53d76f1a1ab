"""SpecEE: the method and its exit predictors."""
