"""Drafters, their sessions and links, as tests make them."""
