"""OmniDraft: the method and its cache of runs."""
