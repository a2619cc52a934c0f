"""Retrieval: serves one index, and changes to another version without missing a look-up."""
