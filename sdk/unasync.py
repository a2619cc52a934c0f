"""Makes the blocking client of the asyncio one: outrider/client.py of outrider/aio.py. With --check: fails if it is stale.

Not the library ``unasync``: that replaces single names, and here docstrings, imports and ``Awaitable[...]`` differ as well.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

SOURCE = Path(__file__).parent / "outrider" / "aio.py"
TARGET = SOURCE.with_name("client.py")
HEADER = "# Made of aio.py by sdk/unasync.py: change that.\n"

SUBSTITUTIONS = [
    # What is said of one client alone.
    (r"The asyncio client: ``Client`` with ``await``\.", "The blocking client."),
    (r"``aclose``, or leaving ``async with``, cancels", "Leaving the loop early, or ``close``, cancels"),
    (r" Use it within one event loop\.", ""),
    # What is imported.
    (r"import asyncio\n", ""),
    (r"import grpc\.aio\n", ""),
    (r"import AsyncGenerator, Awaitable, Callable, Sequence", "import Callable, Generator, Sequence"),
    # Whole expressions.
    (r"grpc\.aio\.", "grpc."),
    (r"asyncio\.sleep", "time.sleep"),
    (r"Awaitable\[(\w+)\]", r"\1"),
    # Words and names.
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAsync(Client|Generator|Stream)\b", r"\1"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\b__a(enter|exit|iter|next)__\b", r"__\1__"),
    (r"\ba(close|closing|next)\b", r"\1"),
]


def blocking(text: str) -> str:
    """The blocking form of asyncio code.

    Raises:
        ValueError: a substitution finds nothing to replace, so the table has fallen behind the code.
    """
    for pattern, replacement in SUBSTITUTIONS:
        text, count = re.subn(pattern, replacement, text)
        if not count:
            raise ValueError(f"nothing matches {pattern!r} any more: remove it from SUBSTITUTIONS, or mend it")
    return HEADER + text


if __name__ == "__main__":
    made = blocking(SOURCE.read_text())
    if "--check" not in sys.argv:
        TARGET.write_text(made)
    elif TARGET.read_text() != made:
        sys.exit(f"{TARGET} is not what {Path(__file__).name} makes of {SOURCE.name}; run {Path(__file__).name}")
