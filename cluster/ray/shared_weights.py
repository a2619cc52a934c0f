"""Has a verifier that Ray starts serve the same weights as the others of its service, also after these were replaced.

It asks the others before it serves, and again from time to time. They may have replaced their weights while it started. And
the router that ordered a replacement may have died before it told all of them to keep the new weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError

from cluster.ray.serve_link import replicas
from speculation.errors import OutriderError, Unavailable

log = logging.getLogger(__name__)

# Seconds for the others' answer: one of them that is replacing its weights answers afterwards.
_ANSWER_S = 600.0
# How often one that serves the first weights asks the others.
_AGAIN_S = 30.0
# What a verifier says that serves the weights it was started with.
_FIRST = ("", "")

# Is given the folder and the digest of weights.
Take = Callable[[str, str], Awaitable[None]]
Count = Callable[[str], Awaitable[dict[str, dict[str, int]]]]


async def take_weights_of_others(take: Take, *, serve: Any = serve, count: Count = replicas) -> None:
    """Ask the other replicas of this one's deployment which weights they serve, and ``take`` them if they are not the first.

    Args:
        serve: finds this replica's deployment and a handle on it.
        count: the replicas of an application.

    Raises:
        Unavailable: they do not say.
    """
    here = serve.get_replica_context()
    states = (await count(here.app_name)).get(here.deployment, {})
    if not states.get("running"):
        return
    handle = serve.get_deployment_handle(here.deployment, app_name=here.app_name)
    try:
        answers = await handle.broadcast("replaced_weights").results_async(timeout_s=_ANSWER_S, return_exceptions=True)
    except (TimeoutError, DeploymentUnavailableError, RayError) as error:
        raise Unavailable(f"the other verifiers do not say which weights they serve ({error})") from error
    told = {answer for answer in answers if isinstance(answer, tuple)}
    if not told:
        raise Unavailable("the other verifiers do not say which weights they serve")
    replaced = sorted(told - {_FIRST})
    if len(replaced) > 1:
        log.error("the other verifiers serve different weights (%s): replace them once more", ", ".join(dict(replaced)))
    for folder, digest in replaced:
        log.info("the other verifiers serve the weights in %s", folder)
        await take(folder, digest)


async def go_on_asking(
    own: Callable[[], Awaitable[tuple[str, str]]], ask_others: Callable[[], Awaitable[None]], every_s: float = _AGAIN_S
) -> None:
    """Ask the others time and again, as long as this one serves the first weights.

    Args:
        own: which it serves, as ``VerifierService.replaced_weights``.
        ask_others: as ``take_weights_of_others``.
    """
    while True:
        await asyncio.sleep(every_s)
        try:
            if await own() == _FIRST:
                await ask_others()
        except (OutriderError, RayError) as error:
            log.warning("the weights of the other verifiers are not served here so far: %s", error)
