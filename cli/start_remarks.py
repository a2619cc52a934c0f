"""What ``outrider serve`` remarks on the machine that it starts on."""

from __future__ import annotations

from cluster.checks.host import idle_gpus, without_kernels
from cluster.process.terminal import stderr
from cluster.ray.address import ray_is_here
from cluster.settings.config import Settings


def say_what_is_idle(settings: Settings, in_process: bool) -> None:
    """Say that a GPU of this machine stays idle, before a start that may take minutes."""
    if in_process or ray_is_here():
        _say(idle_gpus(settings.verifier.device))


def say_what_lacks(settings: Settings, in_process: bool) -> None:
    """Say that there are no compiled kernels, which the start has looked for."""
    if in_process:
        _say(without_kernels(settings.verifier.device, settings.verifier.kernels))


def _say(remark: str) -> None:
    if remark:
        stderr().print(remark, markup=False, highlight=False, soft_wrap=True)
