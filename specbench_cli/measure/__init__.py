"""What was measured on, how quiet it was, and how much memory it took."""
