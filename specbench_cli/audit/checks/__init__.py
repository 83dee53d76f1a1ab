"""What is checked: a check a file, and what several of them need."""
