"""Tree attention over the KV cache, behind transformers' attention interface."""
