"""Plan of a run: its methods, questions, models and order. It is made before the measurement."""
