"""What the records of a run come to: rows, ratios, predictions."""
