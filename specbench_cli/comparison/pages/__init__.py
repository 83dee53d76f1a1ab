"""Output of a comparison as text, Markdown, JSON, JUnit XML and figures."""
