"""Kernels of our own for float32 on a CPU, compiled when a target is loaded."""
