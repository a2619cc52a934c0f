"""Triton's compiler for GPUs that need not be here: kernels are specialised as at a launch, and compiled, but do not run.

Works with TRITON_INTERPRET=0 alone: interpreted kernels cannot be compiled.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class _Driver:
    """What Triton asks of a GPU before it launches something."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        # Triton keeps what it compiles by the number of the device.
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_for(capability: int) -> None:
    """Let kernels be compiled for a compute capability, such as 90."""
    driver.set_active(_Driver(capability))


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack, to which it moves what has no room in them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(re.findall(rf"{word}:(\d+)", told)[0]) for name, word in (("registers", "REG"), ("stack", "STACK"))}


def taken_by(compiled: Any) -> dict[str, int]:
    """By a compiled kernel: ``resources``, its copies of 16 bytes in the background, and bytes of shared memory."""
    return {
        **resources(compiled.asm["cubin"]),
        "copies": compiled.asm["ptx"].count("cp.async.cg"),
        "shared": compiled.metadata.shared,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A kernel as it was to be launched.

    Attributes:
        constants: those by which it is compiled.
        specialised: what else Triton compiles it by: types, and whether numbers and addresses are multiples of 16.
        compiled: compiles it.
    """

    kernel: str
    constants: dict[str, Any]
    specialised: str
    compiled: Callable[[], Any]


@contextmanager
def noted_launches() -> Iterator[list[Launch]]:
    """Within the context nothing is launched, but noted. What kernels would have written is not."""
    noted: list[Launch] = []
    before = JITFunction.__getitem__

    def at(kernel: Any, grid: object) -> Callable[..., None]:
        def launch(*given: Any, **named: Any) -> None:
            binder = kernel.device_caches[driver.active.get_current_device()][-1]
            bound, specialised, _ = binder(*given, **named)
            constants = {each.name: bound[each.name] for each in kernel.params if each.is_constexpr}
            others = [one for one, each in zip(specialised, kernel.params, strict=True) if not each.is_constexpr]
            noted.append(
                Launch(
                    kernel=kernel.__name__,
                    constants=constants,
                    specialised=str(others),
                    compiled=lambda: kernel.warmup(*given, grid=grid, **named),
                )
            )

        return launch

    JITFunction.__getitem__ = at
    try:
        yield noted
    finally:
        JITFunction.__getitem__ = before


def layouts_of_sums(compiled: Any) -> list[str]:
    """Of each sum over lanes in a compiled kernel, how its lanes are spread over threads, from which its order follows."""
    text: str = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    found = re.findall(r'"tt\.reduce"(.*?)\}\) : \(tensor<[^,]*, (#\w+)', text, re.DOTALL)
    return [layouts[name] for body, name in found if "arith.addf" in body]
