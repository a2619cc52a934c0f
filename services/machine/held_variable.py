"""A context variable that has a value within a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def held(variable: ContextVar[T | None], value: T) -> Iterator[None]:
    """Within the block it has that value, and afterwards the one that it had."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)
