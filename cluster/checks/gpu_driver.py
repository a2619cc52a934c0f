"""Whether NVIDIA's driver on a node runs the CUDA of the image for GPUs."""

from __future__ import annotations

# Of the image's torch (k8s/images/gpu.lock), and the oldest driver by CUDA's generation that runs it (NVIDIA's table of
# minor version compatibility, CUDA's release notes).
IMAGE_CUDA = "13.0"
_OLDEST = {"12": 525, "13": 580}
OLDEST_DRIVER = _OLDEST[IMAGE_CUDA.partition(".")[0]]


def too_old(driver: str) -> bool:
    """Whether a driver such as 570.148.08 does not run the image's CUDA."""
    return int(driver.partition(".")[0]) < OLDEST_DRIVER
