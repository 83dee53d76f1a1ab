"""SpecEE: the decoding method and its exit predictors."""
