"""Sources that draft from tokens, one file each: n-grams, suffixes, what the target found likely, an index."""
