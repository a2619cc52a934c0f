"""Runs the service, on Ray or in this process, during a block."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from cluster.config import Settings
from cluster.models import resolve
from cluster.preflight import preflight
from cluster.ray_address import check_ray_answers, ray_is_here
from cluster.signals import stop_on_signals
from cluster.terminal import stderr

err = stderr()


@contextmanager
def serving(settings: Settings, *, in_process: bool, verbose: bool) -> Iterator[str]:
    """Run the service during the block; yields its address.

    Raises:
        ConfigurationError: it cannot start; if possible, raised before anything is fetched or started.
    """
    _set_logging(verbose)
    preflight(settings, here=in_process or ray_is_here())
    if not in_process:
        check_ray_answers()
    model = resolve(settings.model, settings.cache_dir, say=lambda text: err.print(text, soft_wrap=True))
    with ExitStack() as stack:
        if in_process:
            from cluster.local_service import running_in_process

            with _telling("Loading the model"):
                address = stack.enter_context(running_in_process(settings, model))
        else:
            from cluster.on_ray import running_on_ray

            names = "router, drafter, retrieval" if settings.retrieval.enabled else "router, drafter"
            with _telling(f"Starting {names} and verifier on Ray (some twenty seconds)"):
                address = stack.enter_context(running_on_ray(settings, model, verbose=verbose))
        yield address


def wait_for_interrupt() -> None:
    """Wait for Ctrl-C or SIGTERM."""
    # Ray has replaced the signal handlers at its start.
    stop_on_signals()
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
        # The libraries' progress bars and advice would clutter the answer.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("TQDM_DISABLE", "1")
