"""Kernels for GPUs, in Triton: a row's result is the same bits whatever shares its pass.

``device`` holds what runs on the GPU, the other modules what lays out and launches it. Tested through Triton's interpreter
(``TRITON_INTERPRET=1``), whose matrix products the tests replace by a model of Hopper's. An H100 gives the bits
of that model (docs/gpu-kernels.md).
"""
