"""Drafters.

``sources`` has a file for each source that drafts from tokens; ``heads`` and ``draft_model`` run models. ``catalogue`` makes
sources by name, ``sessions`` runs them for many requests at once, ``blend`` makes one tree of their drafts.
"""
