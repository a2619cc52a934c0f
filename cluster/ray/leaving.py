"""Ends the routers of one of Ray's nodes in order, before that node goes: what a pod runs before it is stopped."""

from __future__ import annotations

import logging

from cluster.ray.address import check_ray_answers, foreign_ray
from cluster.ray.disconnecting import disconnect
from speculation.errors import ConfigurationError


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
