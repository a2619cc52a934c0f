"""Native float32 kernels for CPUs, compiled when a target is loaded."""
