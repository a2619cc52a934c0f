"""Kernels as tests compile them, interpret them and record them, with and without a GPU."""
