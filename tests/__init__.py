"""Tests of Outrider."""

import os

# Triton decides when it is imported whether its kernels are interpreted, and torch may import it. On a GPU: TRITON_INTERPRET=0.
os.environ.setdefault("TRITON_INTERPRET", "1")
