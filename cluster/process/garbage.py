"""How a process that serves looks for garbage: not among what it holds from its start, and seldom among what is new."""

from __future__ import annotations

import gc

# New ones are looked through when there are so many more of them than after the last look; Python's own number is 700.
# A step of 256 requests makes 1,600 that all end with it: they were looked through twice a step, a twelfth of its time.
_NEW_OBJECTS = 20_000
_USUAL = gc.get_threshold()


def begin_serving() -> None:
    """Call once all that the process will hold is there.

    To look through that again and again would stop every request for a tenth of a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, *_USUAL[1:])


def end_serving() -> None:
    """Look through everything again: what is left out of that when Python ends is never freed, and libraries complain."""
    gc.unfreeze()
    gc.set_threshold(*_USUAL)
