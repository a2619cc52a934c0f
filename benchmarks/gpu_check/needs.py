"""What the program needs before it can look for a GPU; asked of a Python that may have none of it."""

from __future__ import annotations

import sys
from importlib.util import find_spec

_OLDEST_PYTHON = (3, 11)
_PACKAGES = ("torch", "triton", "transformers")


def unmet(python: tuple[int, ...] = sys.version_info[:3]) -> str:
    """One line on what is missing; empty if nothing is. ``python``: the version that runs this."""
    if python < _OLDEST_PYTHON:
        found, wanted = (".".join(map(str, each[:2])) for each in (python, _OLDEST_PYTHON))
        return f"this is Python {found}: needs {wanted} or later; name one: make gpu-check PYTHON=python3.12"
    absent = [name for name in _PACKAGES if find_spec(name) is None]
    if absent:
        what = " and no ".join(absent)
        return f"{sys.executable} has no {what}: install it there, or name another one: make gpu-check PYTHON=..."
    return ""
