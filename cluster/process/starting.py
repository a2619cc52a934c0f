"""How a process begins: what it does before the slow imports, and how Python's garbage collector is set once it serves."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping

_LOOKS = "GOMP_SPINCOUNT"
# How often libgomp's threads look for work before they sleep; by its own choice 300,000 times. A look takes 10 to 60 ns, and
# threads wait for each other for microseconds, some ten times a layer. But while another program has one of the cores, the
# thread on the other one would look for milliseconds, in place of the one that it waits for (docs/log.md, 2026-11-27).
_FEW = "1000"
# New objects are looked through when there are so many more of them than after the last look (Python's own number is 700),
# older ones with every sixth look, the oldest with every sixth of those. A step of 256 requests makes 1,600 objects that end
# with it: they were looked through twice a step, a twelfth of its time. Requests leave no garbage that only a look finds.
_OFTEN = (20_000, 5, 5)
_USUAL = gc.get_threshold()


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


def look_seldom() -> None:
    """Look seldom from now on. Imports leave next to no garbage, and looking for it was a fifth of their time."""
    gc.set_threshold(*_OFTEN)


def begin_serving() -> None:
    """Call once all that the process will hold is there.

    To look through that again and again would stop every request for a tenth of a second.
    """
    gc.collect()
    gc.freeze()
    look_seldom()


def end_serving() -> None:
    """Look through everything again: what is left out of that when Python ends is never freed, and libraries complain."""
    gc.unfreeze()
    gc.set_threshold(*_USUAL)
