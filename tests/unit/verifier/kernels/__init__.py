"""Kernels, attention and recurrence."""
