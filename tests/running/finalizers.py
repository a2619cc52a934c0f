"""Python code parsed while nothing is finalized."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_finalizers() -> Iterator[None]:
    """Without garbage collection, for whatever parses Python code.

    In Python 3.11 the depth of that is counted for all threads together, so whatever else is parsed when the collector runs
    finalizers in between makes it raise "AST constructor recursion depth mismatch".
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
