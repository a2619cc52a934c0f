"""Waits until an application on Ray runs, or says in one line why it does not."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from speculation.errors import ConfigurationError, InvalidArgument, OutriderError, Unavailable

# Starts the line of a replica's traceback that says why it did not start.
START_FAILED = "outrider-start-failed: "
_POLL_S = 0.1
# Names of the errors that the user can correct; all others are failures.
_OF_SETTINGS = (ConfigurationError.__name__, InvalidArgument.__name__)
# These errors follow from a failure of another component.
_CONSEQUENCES = (Unavailable.__name__,)


def wait_until_running(name: str) -> None:
    """Wait until the application ``name`` runs.

    Raises:
        ConfigurationError: a component refuses the settings or the model; says why.
        OutriderError: a component fails; says why.
    """
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ApplicationStatus

    client = _get_global_client()
    while True:
        # Not ``serve.status()``: it pickles the class of each deployment's request router anew, for 50 ms of the processor's
        # time that the components need to start.
        seen = client.get_serve_status(name)
        application = seen.app_status
        if application.status == ApplicationStatus.NOT_STARTED:
            raise Unavailable(f"the application {name} was deleted while it started")
        if application.status == ApplicationStatus.RUNNING:
            return
        failures = {part.name: part.message for part in seen.deployment_statuses if "failed" in part.message}
        causes = [cause for part, text in failures.items() if (cause := _cause(part, text)) is not None]
        if any(kind not in _CONSEQUENCES for kind, _ in causes) or application.status == ApplicationStatus.DEPLOY_FAILED:
            raise failure(failures, application.message)
        time.sleep(_POLL_S)


def failure(messages: Mapping[str, str], otherwise: str) -> OutriderError:
    """The error that says why components did not start.

    Args:
        messages: Serve's message about each component, of many lines.
        otherwise: text of the error if no message says anything.
    """
    causes = [cause for part, text in messages.items() if (cause := _cause(part, text)) is not None]
    if not causes:
        last = [line.strip() for text in messages.values() for line in text.splitlines() if line.strip()][-1:]
        return OutriderError(f"the service did not start: {(last or [otherwise])[0][:400]}")
    # Refused settings come first: they explain the errors that follow from them.
    kind, text = min(causes, key=lambda cause: (cause[0] in _CONSEQUENCES, cause[0] not in _OF_SETTINGS))
    return ConfigurationError(text) if kind in _OF_SETTINGS else OutriderError(text)


def _cause(part: str, text: str) -> tuple[str, str] | None:
    """Kind and text of the error in a traceback that contains the line ``START_FAILED``; None without it."""
    for line in text.splitlines():
        _, found, encoded = line.partition(START_FAILED)
        if not found:
            continue
        try:
            kind, reason = json.JSONDecoder().raw_decode(encoded)[0]
        except (ValueError, TypeError):
            continue
        known = kind in _OF_SETTINGS or kind in _CONSEQUENCES
        return kind, reason if known else f"the {part} did not start: {kind}: {reason}".splitlines()[0]
    return None
