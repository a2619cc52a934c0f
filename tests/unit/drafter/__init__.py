"""Drafters of text and small models."""
