"""Plan of a run: its methods, questions, models and order, decided before the measurement."""
