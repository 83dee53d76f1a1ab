"""Recipes behind `specbench train`: corpus, tokenizer, training loop and the embedded pair."""
