"""Kernels of linear layers, norms and experts. A row's result does not depend on the other rows of its pass.

``cpu_choice`` and ``gpu_choice`` take the fastest exact kernels, by measurement; ``native`` has those in C, ``triton`` those
for GPUs.
"""
