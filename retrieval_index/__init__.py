"""A corpus made into an index of continuations: read, filtered by perplexity, put into a trie, versioned in Redis."""
