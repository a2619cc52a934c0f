"""How many replicas a component should have, from what its replicas report. Ray Serve applies bounds and delays.

Serve copies the functions of this module into its controller, so it imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

# Shares of a verifier's slots and of its key-value pool. Fuller than the first, they get a companion; one goes once the
# others would be emptier than the second without it. Starts take minutes, and close to its limit a queue grows faster than
# that: so both are low. The gap keeps the number from swinging (docs/log.md: a simulated day with these and other values).
_FULL_ROWS, _FULL_CACHE = 0.4, 0.6
_LOW_ROWS, _LOW_CACHE = 0.25, 0.4
# Streams of one router, and its event loop's delay from which on it is overloaded.
_STREAMS, _LAG_S = 500.0, 0.02
# Share of a core that a Python process should use.
_BUSY = 0.7

Reported = Mapping[str, Iterable[float]]


def verifiers(reported: Reported, replicas: int, target: int) -> float:
    """Verifiers for this load.

    Args:
        reported: of each replica: ``rows``, the share of ``max_num_seqs`` being decoded; ``cache``, the share of its
            key-value pool in use; ``waiting``, requests in its queue.
        replicas: how many there are.
        target: how many there should be so far; it stays where the load is neither high nor low.
    """
    rows, cache = _sum(reported, "rows"), _sum(reported, "cache")
    least = max(rows / _FULL_ROWS, cache / _FULL_CACHE)
    # Less than one on average is a queue that empties by itself.
    if _sum(reported, "waiting") >= 1:
        least = max(least, replicas + 1.0)
    if math.ceil(least) > target:
        return least
    return min(float(target), max(rows / _LOW_ROWS, cache / _LOW_CACHE))


def routers(reported: Reported, replicas: int, target: int) -> float:
    """Routers for this load.

    Args:
        reported: of each replica: ``streams``, open ones; ``lag_s``, the delay of its event loop.
        replicas: how many there are.
        target: how many there should be so far; it does not matter.
    """
    wanted = _sum(reported, "streams") / _STREAMS
    late = max(reported.get("lag_s", ()), default=0.0) > _LAG_S
    return max(wanted, replicas + 1.0) if late else wanted


def processes(reported: Reported, replicas: int, target: int) -> float:
    """Drafters or retrieval services for this load.

    Args:
        reported: of each replica: ``busy``, the cores that its process uses.
        replicas: how many there are; it does not matter, as does ``target``.
    """
    return _sum(reported, "busy") / _BUSY


def _sum(reported: Reported, name: str) -> float:
    return math.fsum(reported.get(name, ()))


_RULES = {"verifier": verifiers, "router": routers, "drafter": processes, "retrieval": processes}


def policy(context: Any) -> tuple[float, dict[str, Any]]:
    """Ray Serve's autoscaling policy: the replicas that a deployment should have now, and no state.

    Args:
        context: ``ray.serve.config.AutoscalingContext``.
    """
    reported = {name: list(each.values()) for name, each in (context.aggregated_metrics or {}).items()}
    # Replicas that have said nothing yet are being started: the number stays.
    if not any(reported.values()):
        return float(context.target_num_replicas), {}
    wanted = _RULES[context.deployment_name](reported, context.current_num_replicas, context.target_num_replicas)
    return max(1.0, wanted), {}


_PERIOD_S = 0.5


class BusyCores:
    """How many cores this process uses."""

    def __init__(self) -> None:
        self._last = time.monotonic(), time.process_time()

    def since_last(self) -> float:
        """Cores used since the last call, on average."""
        now = time.monotonic(), time.process_time()
        passed_s, used_s = now[0] - self._last[0], now[1] - self._last[1]
        self._last = now
        return used_s / passed_s if passed_s > 0 else 0.0


class LoopLag:
    """How late the running event loop gets to what is due."""

    def __init__(self) -> None:
        self._sum_s, self._count = 0.0, 0
        self._task = asyncio.create_task(self._measure(), name="loop-lag")

    def since_last(self) -> float:
        """Mean delay since the last call, in seconds."""
        mean_s = self._sum_s / self._count if self._count else 0.0
        self._sum_s, self._count = 0.0, 0
        return mean_s

    async def _measure(self) -> None:
        while True:
            due = time.monotonic() + _PERIOD_S
            await asyncio.sleep(_PERIOD_S)
            self._sum_s += max(0.0, time.monotonic() - due)
            self._count += 1
