"""Answers of a given form, as requests ask for them: what the grammar engine reads, and what cannot be honoured."""
