"""Drafters.

``sources`` has a file for each source that drafts from tokens, and ``catalogue``, which makes all by name; ``heads`` and
``draft_model`` run models, ``sessions`` runs sources for many requests at once, ``merging`` makes one tree of their drafts.
"""
