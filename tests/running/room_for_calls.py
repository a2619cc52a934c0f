"""Room for the calls of a function: Python 3.11 gives a thread 16 KB for the frames of its calls, and 16 KB more at a time.

A call that needs more asks the system for memory, and gives it back when it returns. So a loop that happens to stand where 16 KB
end pays for that at every call that it makes: up to as much again as for all that it does. Python asks for enough where a frame
itself is large, and what it has left serves the calls below.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

# Of a frame, in pointers: half a megabyte, and as much is left. Memory that nobody touches is none.
_FRAME = 1 << 16


def with_room(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with half a megabyte for what it calls."""

    def called(*given: Any, **named: Any) -> Any:
        return function(*given, **named)

    code = called.__code__.replace(co_stacksize=_FRAME)
    return FunctionType(code, globals(), closure=called.__closure__)
