"""What each process does first, before the slow imports."""

from __future__ import annotations

import os
from collections.abc import Mapping

from cluster.process.garbage import look_seldom

_LOOKS = "GOMP_SPINCOUNT"
# How often libgomp's threads look for work before they sleep; by its own choice 300,000 times. A look takes 10 to 60 ns, and
# threads wait for each other for microseconds, some ten times a layer. But while another program has one of the cores, the
# thread on the other one would look for milliseconds, in place of the one that it waits for (docs/log.md, 2026-11-27).
_FEW = "1000"


def begin_starting() -> None:
    """Look for garbage seldom, since imports leave next to none, and let threads that wait for each other sleep soon.

    ``OMP_WAIT_POLICY`` and ``GOMP_SPINCOUNT`` stay as they are set. Processes that this one starts inherit the latter.
    """
    look_seldom()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(_LOOKS, _FEW)


def as_it_was(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what ``begin_starting`` sets, for other people's programs."""
    return {name: value for name, value in environ.items() if (name, value) != (_LOOKS, _FEW)}
