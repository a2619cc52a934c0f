"""What is checked first on a GPU: ``python -m benchmarks.gpu_check``."""
