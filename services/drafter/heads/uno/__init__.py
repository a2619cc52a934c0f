"""Uno: a diffusion adapter on the target's own weights, which drafts by rows of noise in the target's passes."""
