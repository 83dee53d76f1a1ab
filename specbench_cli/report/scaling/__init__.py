"""How drafting grows with sizes: log-linear laws over trained drafts, or over runs by batch."""
