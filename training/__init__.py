"""Trained drafters: data that the target makes, recipes, training, evaluation and export."""
