"""Plan of a run, made before the measurement: methods, questions, checkpoints and their order."""
