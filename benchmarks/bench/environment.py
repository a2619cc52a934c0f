"""What a result depends on besides the code: machine, versions, commit, threads, and what was typed."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from services.machine.processor import cores, processor

_ROOT = Path(__file__).resolve().parents[2]
# Of a URL, escaped or not: before its host, or among what follows a question mark.
_PASSWORDS = (re.compile(r"(://[^/\s:]*:).+@", re.DOTALL), re.compile(r"([?&]\w*password=)[^&]+"))


def describe(threads: int) -> dict[str, Any]:
    """The environment as a JSON object."""
    return {
        "outrider": version("outrider-server"),
        "commit": commit(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor(),
        "cores": cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
        "threads": threads,
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def typed() -> str:
    """The command, without passwords in URLs."""
    return shlex.join(["outrider", *map(without_passwords, sys.argv[1:])])


def without_passwords(argument: str) -> str:
    """What was typed, or what a file holds of it, without passwords in URLs: results are passed on.

    Settings that are a secret and nothing else are refused where they are typed (``cluster.settings.config``).
    """
    in_host, in_query = _PASSWORDS
    return in_query.sub(r"\1...", in_host.sub(r"\1...@", argument))


def commit() -> str | None:
    """The checked-out commit, with ``+`` appended if files were changed; None outside a checkout."""
    try:
        if Path(_output("git", "-C", str(_ROOT), "rev-parse", "--show-toplevel")) != _ROOT:
            return None
        name = _output("git", "-C", str(_ROOT), "rev-parse", "--short=12", "HEAD")
        return name + ("+" if _output("git", "-C", str(_ROOT), "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _gpus() -> list[str]:
    try:
        return _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
