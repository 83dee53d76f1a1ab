"""The plan of a run: methods, questions, checkpoints and their order, before any is measured."""
