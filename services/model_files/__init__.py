"""Reads a model's folder: weights, configurations, defaults of generation, GGUF. Nothing is computed here."""
