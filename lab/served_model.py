"""A server of ours in a process of its own, for benchmarks that watch it from outside."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil

from benchmarks.soak.free_port import free_port


@contextmanager
def served(model: str, settings: Sequence[str], *, in_process: bool = False) -> Iterator[tuple[str, psutil.Process]]:
    """`outrider serve` during the block; yields its address, where it may not answer yet, and its process.

    Args:
        settings: of the form section.key=value.
        in_process: without Ray.
    """
    port = free_port()
    command = [sys.executable, "-m", "cli.main", "serve", "--model", model, "--port", str(port)]
    command += ["--in-process"] if in_process else []
    command += [part for setting in settings for part in ("--set", setting)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield f"127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(timeout=60)
