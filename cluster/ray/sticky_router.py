"""Sends requests that begin alike to the same verifier, which may hold their keys and values, unless it is overloaded.

Every router computes the same ring from the same list of replicas, and judges their loads by its own streams: nothing is
shared between routers, and one that restarts chooses as before.
"""

from __future__ import annotations

from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

# Serve copies this class with what its module holds: the module must be named, so that the streams are the process's own.
from cluster.ray import open_streams
from cluster.verifiers.choice import choices, place_of


def named(stream: str, session: str) -> str:
    """Serve's session id of a stream, which ``StickyRouter`` takes apart again.

    Args:
        stream: of ``OpenStreams.opened``.
        session: of ``cluster.verifiers.choice.session_of``.
    """
    return f"{stream}/{session}"


class StickyRouter(ConsistentHashRouter):  # type: ignore[misc]  # Ray has no types
    """Ray Serve's ring of replicas, with bounded loads. Calls without a session go to any of the least loaded."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """As ``RequestRouter.choose_replicas``: the replicas to try, one after the other."""
        stream, _, session = getattr(getattr(pending_request, "metadata", None), "session_id", "").partition("/")
        if not session or not candidate_replicas:
            if pending_request is not None:
                pending_request.routing_context.should_backoff = True
            return [candidate_replicas] if candidate_replicas else []
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        if not ranks:
            return []
        ordered = choices(ranks, session, lambda rank: open_streams.OPEN_STREAMS.at(rank[0].replica_id))
        open_streams.OPEN_STREAMS.placed(stream, ordered[0][0].replica_id)
        return ordered

    def _routing_key(self, pending_request: Any) -> str | None:
        key: str | None = super()._routing_key(pending_request)
        # The place on the ring is that of the session's first attempt.
        return None if key is None else place_of(key.partition("/")[2] or key)
