"""The GPU under test: whether there is one, what it is, and how long something takes on it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from services.verifier.model.gpu_here import OLDEST, no_gpu, without_kernels

ON_A_CPU = "cpu: these figures say nothing about a GPU; verdicts on speed are for GPUs"
# From here on a product of matrices adds sixteen terms at a time.
_HOPPER = (9, 0)


def missing(cuda: Any = torch.cuda, version: Any = torch.version) -> str:
    """One line on why nothing can be checked here; empty if something can.

    Args:
        cuda, version: torch's modules of these names.
    """
    if reason := no_gpu(cuda, version):
        return reason
    if version.cuda is None:
        return f"no CUDA: torch {torch.__version__} is built for other GPUs than NVIDIA's"
    old = too_old(cuda.get_device_name(0), cuda.get_device_capability(0))
    return old or without_kernels(torch.device("cuda", 0), cuda)


def too_old(name: str, capability: tuple[int, int]) -> str:
    """Empty from compute capability 8.0 (Ampere) on."""
    if capability >= OLDEST:
        return ""
    wanted, found = (".".join(map(str, each)) for each in (OLDEST, capability))
    return f"{name} is too old: its compute capability is {found}, bfloat16 needs {wanted} (Ampere) or later"


def about(device: str = "cuda") -> dict[str, Any]:
    """The GPU and the software, for the page."""
    import transformers
    import triton

    software = f"triton {triton.__version__}, transformers {transformers.__version__}"
    if device == "cpu":
        return {"device": ON_A_CPU, "software": f"torch {torch.__version__}, {software}"}
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    return {
        "GPU": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} units",
        "compute capability": f"{properties.major}.{properties.minor}"
        + (
            ""
            if capability >= _HOPPER
            else ": equal bits are designed for 9.0 (Hopper) and later; G3 says what this one does"
        ),
        "software": f"torch {torch.__version__} (CUDA {torch.version.cuda}), {software}",
    }


def works(device: str = "cuda") -> bool:
    """Whether the device still works in this process; after some errors (a wrong address) every call of CUDA fails."""
    try:
        return torch.ones(2, device=device).sum().item() == 2
    except Exception:
        # Whatever it raises.
        return False


def milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Median time of ``run`` on the GPU, after two that warm up; without one, of a single run."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    for _ in range(2):
        run()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
