"""Sources that draft from tokens, one file each: n-grams, suffixes, what the target found likely, an index.

``interfaces`` says what a source is, ``catalogue`` makes all of them by name, those that run models too.
"""
