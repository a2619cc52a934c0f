"""Loads a model that can be served exactly from its files, or refuses it with a reason."""
