"""Runs the service, on Ray or in this process, during a block."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from cluster.checks.preflight import preflight
from cluster.entry.public import Addresses
from cluster.models.target import resolve
from cluster.process.logs import quiet_libraries, start_logging
from cluster.process.signals import STOPPED_AT_ONCE, stop_on_signals
from cluster.process.terminal import stderr, telling
from cluster.ray.address import check_ray_answers, ray_is_here
from cluster.settings.config import Settings

err = stderr()


@contextmanager
def serving(settings: Settings, *, in_process: bool, verbose: bool) -> Iterator[Addresses]:
    """Run the service during the block; yields where it answers.

    Raises:
        ConfigurationError: it cannot start; if possible, raised before anything is fetched or started.
    """
    if settings.logging.level is None:
        level = settings.logging.model_copy(update={"level": "info" if verbose else "error"})
        settings = settings.model_copy(update={"logging": level})
    _set_logging(settings, verbose)
    preflight(settings, here=in_process or ray_is_here())
    if not in_process:
        check_ray_answers()
    model = resolve(settings.model, settings.cache_dir, say=lambda text: err.print(text, soft_wrap=True))
    with ExitStack() as stack:
        if in_process:
            from cluster.process.local_service import running_in_process

            with telling(err, "Loading the model"):
                addresses = stack.enter_context(running_in_process(settings, model))
        else:
            from cluster.ray.on_ray import running_on_ray

            names = "router, drafter, retrieval" if settings.retrieval.enabled else "router, drafter"
            with telling(err, f"Starting {names} and verifier on Ray (some twenty seconds)"):
                addresses = stack.enter_context(running_on_ray(settings, model, verbose=verbose))
        yield addresses


def wait_for_interrupt(ready: str) -> None:
    """Print ``ready``, and wait for Ctrl-C or SIGTERM."""
    # Ray has replaced the signal handlers at its start.
    stop_on_signals(STOPPED_AT_ONCE)
    try:
        # Whoever has read this may send the signal at once.
        print(ready, flush=True)
        signal.pause()
    except KeyboardInterrupt:
        err.print("Stopping")


def _set_logging(settings: Settings, verbose: bool) -> None:
    start_logging(settings.logging)
    if not verbose:
        quiet_libraries()
