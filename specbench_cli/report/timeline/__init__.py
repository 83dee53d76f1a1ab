"""Who computed when: lanes of one output, as a picture and as a trace."""
