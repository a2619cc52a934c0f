"""Layers with a state: each computes a function (state, row) -> (state, output), token by token in one order."""
