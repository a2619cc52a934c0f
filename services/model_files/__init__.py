"""Reading a model's folder: weights, configurations, what they say of generation, GGUF. Nothing is computed here."""
