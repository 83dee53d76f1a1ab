"""Verification: how draft tokens are chosen, judged and committed."""
