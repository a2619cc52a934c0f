"""What a run replaces in modules that ask for it themselves: clocks, random names, Serve's and Redis' clients.

For its own thread alone. A service of other tests may run in another one: a timer that its event loop set by the run's clock would
end when the machine's has come to the same number, which may be in a quarter of an hour.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from threading import get_ident
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

from cluster.ray import serve_link
from cluster.ray.open_streams import OpenStreams
from retrieval_index import store
from tests.simulation.serve_handles import Handle
from tests.simulation.virtual_loop import VirtualLoop

# A moment in 2027: keys' dates count from 1970.
EPOCH_S = 1_800_000_000.0
STREAMS: ContextVar[OpenStreams] = ContextVar("the open streams of a router")


class _StreamsOfProcess:
    """Every process's own ``OPEN_STREAMS``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(STREAMS.get(), name)


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _here(stands_in: Callable[_Arguments, _Result], real: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """``stands_in`` in this thread, ``real`` in all others."""
    own = get_ident()

    def either(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        return (stands_in if get_ident() == own else real)(*arguments, **keywords)

    return either


@contextmanager
def simulated(loop: VirtualLoop, seed: int, redis: object, replicas: Callable[[], Mapping[str, int]]) -> Iterator[None]:
    """For the block, the loop's clock is everybody's in this thread, and what is drawn at random follows from the seed.

    Args:
        redis: what ``redis.Redis.from_url`` gives.
        replicas: how many replicas of each deployment Serve counts.
    """
    drawn = random.Random(seed)

    def status() -> SimpleNamespace:
        deployments = {name: SimpleNamespace(replica_states={"RUNNING": count}) for name, count in replicas().items()}
        return SimpleNamespace(applications={Handle.app_name: SimpleNamespace(deployments=deployments)})

    with ExitStack() as patches:
        for module, name, stands_in in (
            (time, "monotonic", loop.time),
            (time, "perf_counter", loop.time),
            (time, "time", lambda: EPOCH_S + loop.time()),
            (secrets, "token_hex", lambda size=16: f"{drawn.getrandbits(8 * size):0{2 * size}x}"),
            (uuid, "uuid4", lambda: uuid.UUID(int=drawn.getrandbits(128))),
            (store.redis.Redis, "from_url", lambda url, **options: redis),
            # Nobody asks a loop for all of its tasks, and keeping count of them costs more than they do.
            (asyncio.tasks._all_tasks, "add", lambda task: None),  # type: ignore[attr-defined]
        ):
            patches.enter_context(patch.object(module, name, _here(stands_in, getattr(module, name))))
        patches.enter_context(patch.object(serve_link, "serve", SimpleNamespace(status=status)))
        patches.enter_context(patch.object(serve_link, "OPEN_STREAMS", _StreamsOfProcess()))
        asyncio.set_event_loop(loop)
        try:
            yield
        finally:
            asyncio.set_event_loop(None)
