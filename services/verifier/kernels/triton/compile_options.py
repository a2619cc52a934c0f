"""How all our Triton kernels are compiled."""

# Products and sums are contracted only where a kernel says ``fma``: the compiler's own choice may differ from kernel to
# kernel and from release to release.
COMPILED = {"enable_fp_fusion": False}
