"""Drafters that read hidden states."""
