"""Drafters.

``sources`` has a file for each source that drafts from tokens; ``heads`` and ``draft_model`` run models. ``sources.catalogue``
makes them by name, ``sessions`` runs them for many requests at once, ``merging`` makes one tree of their drafts.
"""
