"""Whether torch sees a GPU and runs on it, and why not; whether a GPU multiplies in fp8."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from services.verifier.config import TargetConfig
from speculation.errors import ConfigurationError

# Compute capability of the first generation whose matrix units take bfloat16 (Ampere).
OLDEST = (8, 0)
_SHOWN = 200
# Compute capability from which GPUs multiply in fp8.
_FP8_FROM = (8, 9)


def no_gpu(cuda: Any = torch.cuda, version: Any = torch.version) -> str:
    """Why torch sees no GPU, in one line; empty if it sees one.

    Args:
        cuda, version: torch's modules of these names.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if cuda.is_available():
            return ""
    if version.cuda is None:
        return f"no GPU: torch {torch.__version__} is built without CUDA; install torch's CUDA build on a machine with one"
    # torch warns once in a process, but its start raises every time.
    said = " ".join(" ".join((*(str(warning.message) for warning in caught), _at_start(cuda))).split())
    if "driver" in said and "old" in said:
        return f"the GPU's driver is too old for torch {torch.__version__} (CUDA {version.cuda}): {said[:_SHOWN]}"
    return f"no GPU: torch {torch.__version__} sees none{': ' + said[:_SHOWN] if said else ''}"


def _at_start(cuda: Any) -> str:
    """What torch raises when it starts CUDA; empty if it starts."""
    try:
        cuda.init()
    except Exception as error:
        # Of several kinds, by version.
        return str(error)
    return ""


def without_kernels(device: torch.device, cuda: Any = torch.cuda) -> str:
    """Why this build of torch does not run on a GPU that it sees, in one line; empty if it does. ``cuda``: as above."""
    capability, built = cuda.get_device_capability(device), cuda.get_arch_list()
    if not built or any(_runs(one, capability) for one in built):
        return ""
    shown = ".".join(map(str, capability))
    return (
        f"torch {torch.__version__} is built for {', '.join(built)}, and the GPU's compute capability is {shown}: install a "
        "build of torch that has it"
    )


def _runs(built: str, capability: tuple[int, int]) -> bool:
    """Whether code such as sm_90 (for a generation) or compute_90 (to be compiled for any later one) runs on a GPU."""
    kind, _, number = built.partition("_")
    digits = int("".join(one for one in number if one.isdigit()))
    if kind == "compute":
        return digits <= 10 * capability[0] + capability[1]
    return digits // 10 == capability[0] and digits % 10 <= capability[1]


def multiplies_fp8(device: torch.device) -> bool:
    """Whether it is a GPU that multiplies in fp8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FP8_FROM


def check_device(config: TargetConfig) -> None:
    """Refuse a device that this machine or its software does not have.

    Raises:
        ConfigurationError: names the setting and what is possible.
    """
    kind = config.device.partition(":")[0]
    if kind not in ("cpu", "cuda") or (kind == "cpu" and config.device != "cpu"):
        raise ConfigurationError(field="verifier.device", value=config.device, allowed="cpu, cuda or cuda:NUMBER")
    if kind == "cuda" and (reason := no_gpu()):
        raise ConfigurationError(f"{reason}; or use device: cpu", field="verifier.device", value=config.device)
    if kind == "cuda" and torch.device(config.device).index not in (None, *range(torch.cuda.device_count())):
        raise ConfigurationError(
            f"there are {torch.cuda.device_count()} GPUs, from cuda:0 on", field="verifier.device", value=config.device
        )
    if kind == "cuda" and (reason := without_kernels(torch.device(config.device))):
        raise ConfigurationError(f"{reason}; or use device: cpu", field="verifier.device", value=config.device)
