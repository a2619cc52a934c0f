"""Tree attention over the key-value pool, behind transformers' attention interface."""
