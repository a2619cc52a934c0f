"""A causal language model as a source of drafts, with a key-value cache of its own for every session."""
