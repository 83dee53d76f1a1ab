"""What to use here: many candidates on few prompts, few on more, the best one on held-out ones."""
