"""Tiny models, and what drafts for them, in every layout that is read: made by tests, with what they compute."""
