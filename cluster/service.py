"""The service, on Ray or in this process, for as long as a block runs."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from rich.console import Console

from cluster.config import Settings
from cluster.models import resolve

err = Console(stderr=True)


@contextmanager
def running(settings: Settings, *, in_process: bool, verbose: bool) -> Iterator[str]:
    """The service, for the block; gives its address."""
    _set_logging(verbose)
    model = resolve(settings.model, settings.cache_dir, say=lambda text: err.print(text, soft_wrap=True))
    with ExitStack() as stack:
        if in_process:
            from cluster.in_process import running as running_in_process

            with _telling("Loading the model"):
                address = stack.enter_context(running_in_process(settings, model))
        else:
            from cluster.on_ray import running as running_on_ray

            names = "router, drafter, retrieval" if settings.retrieval.enabled else "router, drafter"
            with _telling(f"Starting {names} and verifier on Ray (half a minute)"):
                address = stack.enter_context(running_on_ray(settings, model, verbose=verbose))
        yield address


def wait_for_interrupt() -> None:
    """Until Ctrl-C or SIGTERM."""
    # SIGTERM, which containers and supervisors send, ends the wait like Ctrl-C does; and a shell that starts this in its
    # background would have Ctrl-C's signal ignored.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    try:
        signal.pause()
    except KeyboardInterrupt:
        err.print("Stopping")


def _telling(what: str) -> AbstractContextManager[object]:
    """A spinner on a terminal, a line elsewhere."""
    if err.is_terminal:
        return err.status(what)
    err.print(what)
    return nullcontext()


def _set_logging(verbose: bool) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.ERROR, format="%(asctime)s %(name)s: %(message)s")
    if not verbose:
        # Their progress bars and advice would stand between the user and the answer.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("TQDM_DISABLE", "1")
