"""What a GPU brings: ``python -m benchmarks.gpu_bench``."""
