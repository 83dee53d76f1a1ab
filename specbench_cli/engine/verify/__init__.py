"""Verification: how draft tokens are chosen, accepted or rejected, and committed."""
