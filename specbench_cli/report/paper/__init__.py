"""Material for papers: LaTeX tables, references, and text about the measurement."""
