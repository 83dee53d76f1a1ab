"""OmniDraft: the decoding method and its n-gram cache."""
