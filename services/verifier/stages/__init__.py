"""A target in several processes: pipeline stages, and what travels between them."""
