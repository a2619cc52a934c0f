"""Sends requests that begin alike to the same verifier, which may hold their keys and values, unless it is overloaded.

Every router computes the same choice from the same list of replicas: nothing is shared between them, and a router that
restarts chooses as before.
"""

from __future__ import annotations

from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from cluster.verifier_choice import choices, place_of


class StickyRouter(ConsistentHashRouter):  # type: ignore[misc]  # Ray has no types
    """Ray Serve's ring of replicas, with bounded loads. Calls without a session go to any of the least loaded."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """As ``RequestRouter.choose_replicas``: the replicas to try, one after the other."""
        session = getattr(getattr(pending_request, "metadata", None), "session_id", "")
        if not session or not candidate_replicas:
            if pending_request is not None:
                pending_request.routing_context.should_backoff = True
            return [candidate_replicas] if candidate_replicas else []
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        if not ranks:
            return []
        lengths = self.replica_queue_len_cache
        return choices(ranks, session, lambda rank: lengths.get(rank[0].replica_id) or 0)

    def _routing_key(self, pending_request: Any) -> str | None:
        key: str | None = super()._routing_key(pending_request)
        # The place on the ring is that of the first attempt.
        return None if key is None else place_of(key)
