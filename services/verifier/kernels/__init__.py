"""What multiplies: linear layers, norms and experts whose results do not depend on the other rows of a pass.

``cpu_choice`` and ``gpu_choice`` take the fastest exact kernels, by measurement; ``native`` has those in C, ``triton`` those
for GPUs.
"""
