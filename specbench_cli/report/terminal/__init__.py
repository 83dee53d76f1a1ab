"""Terminal output of runs: tables, comparisons, predictions and recommendations."""
