"""How a process that serves looks for garbage: not among what it holds from its start, and seldom among what is new."""

from __future__ import annotations

import gc

# New objects are looked through when there are so many more of them than after the last look (Python's own number is 700),
# older ones with every sixth look, the oldest with every sixth of those. A step of 256 requests makes 1,600 objects that end
# with it: they were looked through twice a step, a twelfth of its time. Requests leave no garbage that only a look finds.
_OFTEN = (20_000, 5, 5)
_USUAL = gc.get_threshold()


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
