"""Whether our Triton kernels step the states of a model's layers on a device."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from services.verifier.recurrence.device_steps import DeviceSteps
from services.verifier.recurrence.order import Line, Order


def steps_on(
    device: torch.device,
    *,
    capability_of: Callable[[torch.device], tuple[int, int]] = torch.cuda.get_device_capability,
    find: Callable[[str], object] = find_spec,
) -> tuple[DeviceSteps | None, str]:
    """What steps states on a device, or why nothing does; neither on a CPU, which needs nothing.

    Args:
        capability_of: a GPU's compute capability.
        find: finds an installed package, or gives None.
    """
    if device.type == "cpu":
        return None, ""
    if find("triton") is None:
        return None, "triton is not installed"
    from services.verifier.kernels.triton.row_steps import TritonSteps
    from services.verifier.kernels.triton.tree_pass import too_old

    steps = TritonSteps()
    reason = too_old(capability_of(device)) or trial(steps, device)
    return (None, reason) if reason else (steps, "")


def trial(steps: DeviceSteps, device: torch.device) -> str:
    """Why the kernels do not run here, such as for want of a C compiler; empty if a small pass does."""
    try:
        order = Order(lines=[Line(slot=0, accepted=0, chain=1, parents=(-1, -1))], padding=0, device=device, steps=steps)
        given = torch.zeros(3, 16, device=device, dtype=torch.float32)
        made = steps.convolved(
            order.walk,
            torch.zeros(1, 2, 16, device=device, dtype=torch.float32),
            given,
            torch.ones(16, 3, device=device, dtype=torch.float32),
            None,
        )
        # Copied, so that failures on the GPU show here.
        steps.scanned(order.walk, torch.zeros(1, 16, device=device, dtype=torch.float32), made, made).cpu()
    except Exception as error:
        # Compilers and drivers may fail in any way.
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""
