"""Prometheus's own tool, where it is on this machine: on the PATH, or what PROMTOOL names."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not here (Debian: apt install prometheus; or PROMTOOL=/path/to/promtool)"
)


def promtool(*words: str, stdin: str = "") -> str:
    """What promtool says; an assertion if it finds fault."""
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *words], input=stdin, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
