"""Training behind `specbench train`: corpus, replies, losses, training loop and heads."""
