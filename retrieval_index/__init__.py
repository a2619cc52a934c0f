"""Builds an index of continuations from a corpus: perplexity filter, n-gram trie, versions in Redis."""
