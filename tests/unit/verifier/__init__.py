"""The verifier beside its engine and kernels."""
