"""Messages on the terminal besides the answer: notes on stderr, and errors in one line each."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from services.logs.printable import escaped
from speculation.errors import ConfigurationError, InvalidArgument, OutriderError

if TYPE_CHECKING:
    from rich.console import Console


def prepare_streams() -> None:
    """Make stdout and stderr take any text: an encoding without a character writes its number, a closed stream nothing."""
    # gRPC's own lines about each attempt would stand before the one that says what is wrong.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # Else the next file or socket would get the stream's number, and what libraries print.
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # for as long as we run
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def stderr() -> Console:
    """Console for notes; stdout is left to the answer."""
    from rich.console import Console

    return Console(stderr=True)


def stdout() -> Console:
    """Console for tables and other results: as wide as the terminal; for a file or a pipe, wide enough for all tables."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)


def telling(console: Console, what: str) -> AbstractContextManager[object]:
    """What goes on during a block: a spinner on a terminal, a line elsewhere."""
    if console.is_terminal:
        return console.status(what)
    console.print(what)
    return nullcontext()


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """How far a block is, on stderr; it says each time that one more of ``total`` is done."""
    from rich.progress import Progress

    with Progress(console=stderr(), transient=True) as bars:
        task = bars.add_task(what, total=total)
        yield lambda: bars.advance(task)


def explain(error: BaseException) -> tuple[str, int] | None:
    """One line for ``error`` and the exit code: 2 for a mistake of the user, 1 for a failure.

    None: the error is a bug in Outrider.
    """
    if isinstance(error, OutriderError):
        return str(error), 2 if isinstance(error, (ConfigurationError, InvalidArgument)) else 1
    # Errors of the SDK, if it was imported.
    client = sys.modules.get("outrider.errors")
    if client is not None and isinstance(error, client.OutriderError):
        return str(error), 2 if isinstance(error, client.InvalidArgument) else 1
    if isinstance(error, UnicodeDecodeError):
        return f"what was read is not UTF-8: {error.reason} at byte {error.start}", 2
    if isinstance(error, OSError):
        what = error.strerror or str(error) or type(error).__name__
        return (what, 1) if error.filename is None else (f"{os.fsdecode(error.filename)}: {what}", 2)
    if isinstance(error, MemoryError):
        return "out of memory; a smaller model, dtype or verifier.kv_cache_tokens needs less", 1
    return None


def tell(line: str) -> None:
    """Print an error in one line. It may quote others: a file's text, a peer's words."""
    from rich.markup import escape

    stderr().print("[bold red]error:[/bold red]", escape(escaped(line)), highlight=False, soft_wrap=True)


def end_with(error: Exception) -> NoReturn:
    """Print an error and exit with its code; a bug in Outrider is raised as it is."""
    told = explain(error)
    if told is None:
        raise error
    tell(told[0])
    sys.exit(told[1])
