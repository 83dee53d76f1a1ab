"""Drafting: operations that several methods draft with."""
