"""Checks whether this machine has what the service needs.

The checks change nothing but the cache of compiled kernels.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape

from cluster.checks import host
from cluster.checks.preflight import model_folder, preflight
from cluster.models.drafters import trained_config
from cluster.models.target import BUILT_IN
from cluster.ray.address import check_ray_answers, foreign_ray, ray_is_here
from cluster.settings import component_configs
from cluster.settings.config import Settings
from services.api.sockets import bind_ops, check_http, check_server
from services.machine.processor import cores, free_memory, processor
from services.verifier.kernels.native.library import instruction_sets
from speculation.errors import OutriderError

_GIB = 2**30
_LEAST_FREE_DISK = 2 * _GIB
_LEAST_FILES = 4096
_KERNELS_S = 330.0
# In a process of its own: torch takes seconds to load, and a compiled kernel that does not run ends its process.
_KERNELS = """
import torch
from services.verifier.kernels.native.library import library, why_none
found = library()
print(torch.__version__, f"none: {why_none()}" if found is None else found.name)
"""

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        status: warn: it works, but slower or only for a while; fail: the service would not start, or not work.
        found: what is there.
        advice: what to do; empty if nothing.
    """

    check: str
    status: Status
    found: str
    advice: str = ""


def findings(settings: Settings) -> Iterator[Finding]:
    """Make all checks, one after the other; a check that itself fails is a finding, too."""
    for name, check in CHECKS.items():
        try:
            yield from check(name, settings)
        except OutriderError as error:
            yield Finding(
                check=name, status="fail", found=str(error), advice="`outrider plan` says it again once it is mended"
            )
        except Exception as error:
            yield Finding(check=name, status="warn", found=f"could not be checked: {type(error).__name__}: {error}")


def _python(name: str, settings: Settings) -> Iterator[Finding]:
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.maxsize < 2**32:
        yield Finding(check=name, status="fail", found=f"{found}, 32 bits", advice="use a 64-bit Python")
    else:
        yield Finding(check=name, status="ok", found=found)


def _packages(name: str, settings: Settings) -> Iterator[Finding]:
    wrong = []
    checked = 0
    for line in metadata.requires("outrider-server") or ():
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        checked += 1
        try:
            there = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{wanted.name} is missing")
            continue
        if not wanted.specifier.contains(there, prereleases=True):
            wrong.append(f"{wanted.name} is {there}, not {wanted.specifier}")
    if wrong:
        yield Finding(check=name, status="fail", found="; ".join(wrong), advice="run: pip install 'outrider-server[cpu]'")
        return
    yield Finding(check=name, status="ok", found=f"all {checked} that are needed, Ray {metadata.version('ray')}")


def _processor(name: str, settings: Settings) -> Iterator[Finding]:
    sets = instruction_sets()
    found = f"{processor() or platform.machine()}, {cores()} cores usable, {', '.join(sets) or 'no wide vectors'}"
    if sets:
        yield Finding(check=name, status="ok", found=found)
        return
    advice = "none of our kernels fits: torch's are used, several times slower; use a processor with AVX2 and FMA, or NEON"
    yield Finding(check=name, status="warn", found=found, advice=advice)


def _device(name: str, settings: Settings) -> Iterator[Finding]:
    host.check_device(settings.verifier.device)
    host.check_device(trained_config(settings).device, "drafter.device")
    gpus = host.count_gpus()
    found = f"verifier on {settings.verifier.device}, {gpus} NVIDIA GPUs here"
    idle = host.idle_gpus(settings.verifier.device, lambda: gpus)
    advice = f"{idle}; install the gpu extra" if idle else ""
    yield Finding(check=name, status="warn" if idle else "ok", found=found, advice=advice)


def _kernels(name: str, settings: Settings) -> Iterator[Finding]:
    compiler = os.environ.get("CC", "cc")
    done = subprocess.run([sys.executable, "-c", _KERNELS], capture_output=True, text=True, timeout=_KERNELS_S, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        advice = "install torch: pip install torch (or the extra cpu or gpu of outrider-server)"
        yield Finding(check=name, status="fail", found=f"torch cannot be loaded: {last[:300]}", advice=advice)
        return
    version, _, kernels = done.stdout.strip().partition(" ")
    if not kernels.startswith("none: "):
        yield Finding(check=name, status="ok", found=f"torch {version}; kernels for {kernels} are there and run")
        return
    there = shutil.which(compiler)
    why = f"{there} does not compile what runs here" if there else f"there is no C compiler ({compiler})"
    advice = (
        "install gcc or clang (Debian: apt install gcc libc6-dev); without, passes take several times longer, and weights "
        "of few bits become float32"
    )
    if named := _needing_kernels(settings):
        advice = f"{advice}; {' and '.join(named)} cannot be honoured, so a verifier does not start here"
    found = f"torch {version}; {why} ({kernels.removeprefix('none: ')[:300]})"
    yield Finding(check=name, status="fail" if named else "warn", found=found, advice=advice)


def _needing_kernels(settings: Settings) -> list[str]:
    """Settings that our kernels alone honour on a CPU."""
    verifier = settings.verifier
    if verifier.device != "cpu":
        return []
    named: tuple[tuple[str, object, bool], ...] = (
        ("kernels", verifier.kernels, verifier.kernels not in ("auto", "onednn", "torch")),
        ("weights", verifier.weights, verifier.weights == "as_stored"),
        ("dtype", verifier.dtype, verifier.dtype == "int8"),
        ("kv_cache_dtype", verifier.kv_cache_dtype, verifier.kv_cache_dtype != "auto"),
        ("tensor_parallel_size", verifier.tensor_parallel_size, verifier.tensor_parallel_size > 1),
        ("lora_modules", "set", bool(verifier.lora_modules)),
        ("lora_folders", "set", bool(verifier.lora_folders)),
    )
    return [f"verifier.{name}: {value}" for name, value, needs in named if needs]


def _model(name: str, settings: Settings) -> Iterator[Finding]:
    folder = model_folder(settings)
    if folder is not None:
        yield Finding(check=name, status="ok", found=f"{settings.model} in {folder}")
        return
    source = "PyPI" if settings.model == BUILT_IN else "where it is"
    found = f"{settings.model} is not on this machine yet"
    yield Finding(check=name, status="warn", found=found, advice=f"the first start fetches it from {source}: be online then")


def _memory(name: str, settings: Settings) -> Iterator[Finding]:
    unchecked = preflight(_anywhere(settings), here=ray_is_here())
    found = f"{free_memory() / _GIB:.1f} GiB free"
    if unchecked:
        yield Finding(check=name, status="warn", found=f"{found}; not checked: {'; '.join(unchecked)}")
    else:
        yield Finding(check=name, status="ok", found=f"{found}: enough for weights and cache, as `outrider plan` counts")


def _disk(name: str, settings: Settings) -> Iterator[Finding]:
    host.check_folder("cache_dir", settings.cache_dir)
    there = settings.cache_dir
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    found = f"{settings.cache_dir}, {free / _GIB:.1f} GiB free"
    if free < _LEAST_FREE_DISK:
        yield Finding(check=name, status="warn", found=found, advice="models and kernels are kept there: make room")
    else:
        yield Finding(check=name, status="ok", found=found)


def _ports(name: str, settings: Settings) -> Iterator[Finding]:
    server, http = settings.server, component_configs.http_config(settings)
    looks: tuple[tuple[str, str, int | None, Callable[[], None]], ...] = (
        ("public", "server.port", server.port, lambda: check_server(component_configs.server_config(settings))),
        ("http", "server.http_port", server.http, lambda: None if http is None else check_http(http)),
        ("ops", "server.ops_port", server.ops, lambda: bind_ops(server.ops_host, server.ops or 0).close()),
    )
    for what, setting, number, look in looks:
        if number is None:
            continue
        try:
            look()
        except OutriderError as error:
            advice = f"stop what has it (a running server?), or choose another {setting}"
            yield Finding(check=name, status="fail", found=str(error), advice=advice)
        else:
            yield Finding(check=name, status="ok", found=f"{what}: {number or 'any free one'}")


def _index(name: str, settings: Settings) -> Iterator[Finding]:
    retrieval = settings.retrieval
    if not retrieval.enabled:
        yield Finding(check=name, status="ok", found="none is set; strategies that look up are refused")
    elif retrieval.redis_url is not None:
        from retrieval_index.access import without_password
        from retrieval_index.store import IndexStore

        with IndexStore(retrieval.redis_url, retrieval.name, retrieval.redis_password) as store:
            live = store.live()
        where = without_password(retrieval.redis_url)
        if live is None:
            advice = f"publish one: outrider index publish FOLDER --name {retrieval.name}"
            yield Finding(check=name, status="warn", found=f"{where} answers; no version of {retrieval.name}", advice=advice)
        else:
            yield Finding(check=name, status="ok", found=f"{where} answers; {retrieval.name} is version {live}")
    elif retrieval.index is not None:
        from retrieval_index.manifest import read_manifest

        manifest = read_manifest(retrieval.index)
        yield Finding(check=name, status="ok", found=f"{retrieval.index}, version {manifest.version}")


def _ray(name: str, settings: Settings) -> Iterator[Finding]:
    here, address = metadata.version("ray"), foreign_ray()
    if address is not None:
        check_ray_answers()
        yield Finding(check=name, status="ok", found=f"{address} answers; {here} here, which must be its version too")
    else:
        yield Finding(check=name, status="ok", found=f"{here}; `outrider serve` starts one of its own")
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft != resource.RLIM_INFINITY and soft < _LEAST_FILES:
        advice = f"Ray and many clients need more: ulimit -n {_LEAST_FILES * 16}"
        yield Finding(check=name, status="warn", found=f"at most {soft} open files", advice=advice)
    shared = Path("/dev/shm")
    if shared.is_dir() and (free := shutil.disk_usage(shared).free) < _GIB // 4:
        advice = "Ray keeps objects there; in a container: --shm-size=1g"
        yield Finding(check=name, status="warn", found=f"{free / 2**20:.0f} MiB free in {shared}", advice=advice)


def _tracing(name: str, settings: Settings) -> Iterator[Finding]:
    endpoint = settings.tracing.otlp_endpoint
    if endpoint is None:
        yield Finding(check=name, status="ok", found="off (tracing.otlp_endpoint)")
        return
    from services.tracing.otlp_export import check_tracing

    check_tracing()
    yield Finding(check=name, status="ok", found=f"to {re.sub('//[^/@]*@', '//', endpoint)}")


def _clock(name: str, settings: Settings) -> Iterator[Finding]:
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    made = max(file.stat().st_mtime for file in Path(__file__).parent.glob("*.py"))
    advice = "set the clock: certificates and limits per minute depend on it (timedatectl set-ntp true)"
    if time.time() < made - 86400:
        yield Finding(check=name, status="fail", found=f"{now}: before Outrider was installed", advice=advice)
    elif _unsynchronised():
        yield Finding(check=name, status="warn", found=f"{now}; the system says that it is not synchronised", advice=advice)
    else:
        yield Finding(check=name, status="ok", found=now)


def _unsynchronised() -> bool:
    """Whether Linux's clock has no source of time (TIME_ERROR of adjtimex). False where that cannot be known."""
    try:
        adjtimex: Any = ctypes.CDLL(None).adjtimex
        state = int(adjtimex(ctypes.create_string_buffer(512)))
    except (OSError, AttributeError):
        return False
    return state == 5


def _anywhere(settings: Settings) -> Settings:
    """The settings with free ports, which one router alone can have: taken ones are found by a check of their own."""
    http = None if settings.server.http_port is None else 0
    server = settings.server.model_copy(update={"port": 0, "http_port": http, "ops_port": None})
    router = settings.router.model_copy(update={"replicas": 1, "autoscaling": None})
    return settings.model_copy(update={"server": server, "router": router})


CHECKS: dict[str, Callable[[str, Settings], Iterator[Finding]]] = {
    "python": _python,
    "packages": _packages,
    "processor": _processor,
    "device": _device,
    "torch and kernels": _kernels,
    "model": _model,
    "memory": _memory,
    "disk": _disk,
    "ports": _ports,
    "index": _index,
    "ray": _ray,
    "tracing": _tracing,
    "clock": _clock,
}


_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def examine(settings: Settings, *, as_json: bool) -> bool:
    """Make every check and print what it found, a line each. Returns whether none has failed."""
    console = Console()
    found: list[Finding] = []
    for finding in findings(settings):
        found.append(finding)
        if not as_json:
            _print(console, finding)
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], ensure_ascii=False, indent=1))
    return all(finding.status != "fail" for finding in found)


def _print(console: Console, finding: Finding) -> None:
    status = f"[{_COLOURS[finding.status]}]{finding.status:4}[/]"
    console.print(f"{status}  {finding.check:18} {escape(finding.found)}", highlight=False, soft_wrap=True)
    if finding.advice:
        console.print(f"      {'':18} -> {escape(finding.advice)}", highlight=False, soft_wrap=True)
