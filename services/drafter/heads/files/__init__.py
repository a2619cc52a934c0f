"""Checkpoints of heads: which kind a folder holds, its configuration, its layout, its weights."""
