"""Checks settings against this machine without torch and Ray: GPUs, writable folders, addresses."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from services.machine.sockets import addresses_of, bind
from services.verifier.kernels.native.library import why_none
from services.whole_number import whole_number
from speculation.errors import ConfigurationError

_MIB = 2**20
# Of a machine: far more than any has.
_MOST_GPUS = 9999


def count_gpus() -> int:
    """Number of GPUs according to NVIDIA's driver; 0 without a driver."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    except OSError:
        return 0
    return 0 if failed else count.value


def check_device(
    device: str,
    setting: str = "verifier.device",
    *,
    version_of: Callable[[str], str] = metadata.version,
    count: Callable[[], int] = count_gpus,
) -> None:
    """Check that this machine has the device.

    Args:
        setting: names it, for the error.
        version_of: the version of an installed package.
        count: of the GPUs here.

    Raises:
        ConfigurationError: it does not, or the name is malformed.
    """
    kind, _, named = device.partition(":")
    number = whole_number(named, 0, _MOST_GPUS)
    if device != "cpu" and not (kind == "cuda" and (number is not None or device == "cuda")):
        raise ConfigurationError(field=setting, value=device, allowed="cpu, cuda or cuda:NUMBER")
    if kind == "cpu":
        return
    with contextlib.suppress(metadata.PackageNotFoundError):
        if (built := version_of("torch")).endswith("+cpu"):
            raise ConfigurationError(
                "install a build with CUDA, or use device: cpu",
                field=setting,
                value=device,
                given=f"but PyTorch here ({built}) is built for CPUs",
            )
    gpus = count()
    if not gpus:
        raise ConfigurationError(field=setting, value=device, given="but there is no NVIDIA GPU here; use device: cpu")
    if number is not None and number >= gpus:
        raise ConfigurationError(f"there are {gpus} GPUs, from cuda:0 on", field=setting, value=device)


def check_gpus(device: str, stages: int, ranks: int, count: Callable[[], int] = count_gpus) -> None:
    """Check that each process of a target whose processes all run on this machine has a GPU of its own.

    Args:
        count: of the GPUs here.

    Raises:
        ConfigurationError: there are more processes than GPUs.
    """
    kind, _, number = device.partition(":")
    if kind == "cpu" or stages * ranks <= (gpus := 1 if number else count()):
        return
    field, value = ("tensor_parallel_size", ranks) if ranks > 1 else ("stages", stages)
    raise ConfigurationError(
        f"with {stages} {'stages' if stages > 1 else 'stage'} a target has {stages * ranks} processes, each on a GPU of its "
        f"own, and device {device} has {gpus} here",
        field=f"verifier.{field}",
        value=value,
    )


def idle_gpus(device: str, count: Callable[[], int] = count_gpus) -> str:
    """A line for whoever starts a service, if GPUs of this machine stay idle; empty: there are none, or the target uses one.

    Args:
        device: of the settings, as under ``verifier``.
        count: of the GPUs here.
    """
    if device != "cpu" or not (gpus := count()):
        return ""
    said = "An NVIDIA GPU is here and stays idle" if gpus == 1 else f"{gpus} NVIDIA GPUs are here and stay idle"
    return f"{said}: with --set verifier.device=cuda --set verifier.dtype=bfloat16 the model computes on one (docs/gpus.md)"


def without_kernels(device: str, kernels: str) -> str:
    """A line for whoever starts a service, if this machine has no compiled kernels; empty: it has some, or others are named.

    Args:
        device, kernels: of the settings, as under ``verifier``.
    """
    if device != "cpu" or kernels != "auto" or not (why := why_none()):
        return ""
    return (
        "Without compiled kernels on this machine, passes take several times longer and weights of few bits become floats "
        f"(`outrider doctor` says what to do): {why[:300]}"
    )


def check_folder(name: str, folder: Path, needed_bytes: int = 0) -> None:
    """Check that files can be written to ``folder``, which need not exist yet.

    Args:
        name: name of the setting, for the error.
        needed_bytes: bytes that must be free.

    Raises:
        ConfigurationError: the folder cannot be written to, or has not enough room.
    """
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing) as trial:
            trial.write(b"x")
    except OSError as error:
        where = "" if existing == folder else f" in {existing}"
        raise ConfigurationError(
            f"cannot write{where} ({error.strerror}); name a folder that can be written to", field=name, value=folder
        ) from error
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise ConfigurationError(
            (
                f"{needed_bytes / _MIB:,.0f} MiB are needed there, {free / _MIB:,.0f} MiB are free; make room, or "
                "name another folder"
            ),
            field=name,
            value=folder,
        )


def check_interface(name: str, host: str) -> None:
    """Check that a server can listen on ``host``.

    Args:
        name: name of the setting, for the error.

    Raises:
        ConfigurationError: the host is unknown, or is not an address of this machine.
    """
    try:
        bind(*addresses_of(host)[0]).close()
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            field=name,
            value=host,
            allowed=f"the address of one of this machine's interfaces ({getattr(error, 'strerror', None) or error})",
        ) from error


@contextlib.contextmanager
def refused_port(component: str, host: str, port: int) -> Iterator[None]:
    """Start a component's gRPC server in the block.

    Raises:
        ConfigurationError: it cannot listen there; names the settings.
    """
    try:
        yield
    except RuntimeError as error:
        raise ConfigurationError(
            f"cannot listen on {host}:{port}; choose another {component}.port or {component}.host", about=f"{component}.port"
        ) from error
