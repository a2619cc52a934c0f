"""Calls a method of every replica of a deployment, and reports which did not answer."""

from __future__ import annotations

import asyncio
import logging

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from speculation import limits

log = logging.getLogger(__name__)

# In these states a replica holds nothing of any request.
_EMPTY = ("STARTING", "STOPPED")


async def tell_all(
    handle: DeploymentHandle,
    method: str,
    *arguments: object,
    within_s: float = limits.FORGET_S,
) -> str | None:
    """Call ``method`` of every replica. Returns a sentence on how many failed, None if all succeeded.

    Serve's broadcast silently skips replicas that it cannot reach or that are stopping, so the replicas are counted first.

    Args:
        within_s: seconds allowed for the count, and again for the answers.
    """
    name, total = handle.deployment_name, 0
    try:
        total = await asyncio.wait_for(_count(handle), within_s)
        answers = await handle.broadcast(method, *arguments).results_async(timeout_s=within_s, return_exceptions=True)
    except TimeoutError:
        return f"not all of {total or 'the'} {name} replicas answered within {within_s:g} s"
    except (DeploymentUnavailableError, RayError) as error:
        log.warning("no %s could be called to %s: %s", name, method, error)
        answers = []
    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    for reason in failed:
        log.warning("a %s did not %s: %s", name, method, reason)
    total = max(total, len(answers), 1)
    missed = total - (len(answers) - len(failed))
    return f"{missed} of {total} {name} replicas did not answer" if missed else None


async def _count(handle: DeploymentHandle) -> int:
    """Number of replicas that may hold data of requests."""
    status = await asyncio.to_thread(serve.status)
    application = status.applications.get(handle.app_name)
    deployment = None if application is None else application.deployments.get(handle.deployment_name)
    states = {} if deployment is None else deployment.replica_states
    return sum(number for state, number in states.items() if str(getattr(state, "value", state)) not in _EMPTY)
