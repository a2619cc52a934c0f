"""The service, on Ray or in this process, for as long as a block runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console

from cluster.config import Settings
from cluster.models import resolve

err = Console(stderr=True)


@contextmanager
def running(settings: Settings, *, in_process: bool, verbose: bool) -> Iterator[str]:
    """The service, for the block; gives its address."""
    _set_logging(verbose)
    model = resolve(settings.model, settings.cache_dir, say=err.print)
    with ExitStack() as stack:
        if in_process:
            from cluster.in_process import running as running_in_process

            with err.status("Loading the model"):
                address = stack.enter_context(running_in_process(settings, model))
        else:
            from cluster.on_ray import running as running_on_ray

            with err.status("Starting router, drafter and verifier on Ray"):
                address = stack.enter_context(running_on_ray(settings, model, verbose=verbose))
        yield address


def _set_logging(verbose: bool) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.ERROR, format="%(asctime)s %(name)s: %(message)s")
    if not verbose:
        # Their progress bars and advice would stand between the user and the answer.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("TQDM_DISABLE", "1")
