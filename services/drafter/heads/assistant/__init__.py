"""Gemma 4's assistants: drafters whose layers have queries alone, for keys and values of the target's own layers."""
