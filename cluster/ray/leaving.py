"""Leaves Ray: this process for good, or the routers of a node before that node goes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections import defaultdict
from typing import Any

from cluster.ray.address import check_ray_answers, foreign_ray
from speculation.errors import ConfigurationError

# What still runs in Serve's thread is over long before; a thread that hangs does not keep us.
_PATIENCE_S = 5.0


def leave(name: str, node_ip: str | None = None, timeout_s: float | None = None) -> int:
    """Have the routers of this machine's node refuse further calls, and wait until their streams have ended.

    They do not come back: the node is to be stopped then, and Serve replaces them elsewhere. Answers of a verifier that
    goes move to others by themselves.

    Args:
        name: of the application (``cluster.name``).
        node_ip: the node's address, where this machine has several.
        timeout_s: longest to wait; None: as long as the routers take.

    Returns:
        How many routers have ended.

    Raises:
        ConfigurationError: RAY_ADDRESS names no Ray that answers, or nothing of this name runs there.
        TimeoutError: streams were still open at the end.
    """
    check_ray_answers()
    import ray
    from ray import serve
    from ray.serve.exceptions import RayServeException

    # Importing Serve sets another level.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    more = {} if node_ip is None else {"_node_ip_address": node_ip}
    ray.init(address=foreign_ray() or "auto", log_to_driver=False, logging_level=logging.ERROR, **more)
    try:
        node = ray.get_runtime_context().get_node_id()
        try:
            routers = serve.get_deployment_handle("router", name)
            answers = routers.broadcast("leave", node).results(timeout_s=timeout_s, return_exceptions=True)
        except RayServeException as error:
            raise ConfigurationError("no such service runs on this Ray", field="cluster.name", value=name) from error
    finally:
        disconnect()
    return sum(answer is True for answer in answers)


def disconnect() -> None:
    """Leave Ray; a Ray that this process has started ends. Any later call of Ray's API would connect the process anew."""
    import ray

    end_listening()
    ray.shutdown()


def end_listening() -> None:
    """Have the handles of Ray Serve listen to its controller no longer, nor report to it.

    They do both in a thread of Serve's. ``ray.shutdown`` leaves that running, and its next question to the controller makes
    Ray connect again by itself, with its own log lines and a traceback on stderr.
    """
    from ray.serve import context
    from ray.serve._private.long_poll import LongPollClient

    by_loop = defaultdict[asyncio.AbstractEventLoop, list[Any]](list)
    # All handles share a listener that Serve offers no way to.
    for each in gc.get_objects():
        if type(each) is LongPollClient and each.event_loop.is_running():
            by_loop[each.event_loop].append(each)
    for loop, listeners in by_loop.items():
        # In the loop itself, so that none is about to ask.
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_stop(listeners), loop).result(_PATIENCE_S)
    if (client := context._global_client) is not None:
        client.shutdown_cached_handles()


async def _stop(listeners: list[Any]) -> None:
    for each in listeners:
        each.stop()
