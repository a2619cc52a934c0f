"""A verifier that Ray starts serves the weights that the others of its service serve, which need not be the first ones."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError

from cluster.ray.serve_link import replicas
from speculation.errors import Unavailable

log = logging.getLogger(__name__)

# Seconds for the others' answer: one of them that is replacing its weights answers afterwards.
_ANSWER_S = 600.0


async def take_weights_of_others(take: Callable[[str, str], Awaitable[None]]) -> None:
    """Ask the other replicas of this one's deployment which weights they serve, and ``take`` them if they are not the first.

    Args:
        take: is given the folder and the digest.

    Raises:
        Unavailable: they do not say.
    """
    here = serve.get_replica_context()
    states = (await replicas(here.app_name)).get(here.deployment, {})
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
    for folder, digest in told - {("", "")}:
        log.info("the other verifiers serve the weights in %s", folder)
        await take(folder, digest)
