"""What Ray Serve does around an autoscaling policy: averages what replicas report, applies factors, delays and bounds.

Written without Ray so that it runs on a simulated clock; a test compares the decisions with Ray Serve's own functions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from cluster.ray import scaling
from cluster.settings.placement import Autoscaling

# Serve asks the replicas for their load once in this share of the look-back period.
ASKS = 0.2
# As ray.serve.autoscaling_policy: differences of large times are not exact.
_EPSILON_S = 1e-6

Report = Mapping[str, float]
Policy = Callable[[Any], tuple[float, dict[str, Any]]]


@dataclass(slots=True)
class Delays:
    """Changes of the target only once they have been wanted for long enough without a break."""

    upscale_delay_s: float
    downscale_delay_s: float
    _direction: int = 0
    _since: float = 0.0

    def decide(self, wanted: float, running: int, target: int, now: float) -> int:
        """The new target.

        Args:
            wanted: by the policy.
            running: replicas that are there.
            target: replicas that there should be so far.
            now: seconds.
        """
        # With Serve's factors of 1, what is wanted counts in full; with none there, at once.
        count = math.ceil(running + (wanted - running)) if running else math.ceil(wanted)
        if running == 0 and count > 0:
            return count
        direction = (count > target) - (count < target)
        if direction == 0 or direction != self._direction:
            self._direction, self._since = direction, now
        if direction == 0:
            return target
        delay_s = self.upscale_delay_s if direction > 0 else self.downscale_delay_s
        if now - self._since + _EPSILON_S < delay_s:
            return target
        self._direction = 0
        return max(1, count)


class Autoscaler:
    """Serve's controller for the verifiers: call ``report`` every ``period_s`` seconds, then ``target_now``.

    Args:
        policy: as Serve calls it; the default is ours.
    """

    def __init__(self, bounds: Autoscaling, policy: Policy = scaling.policy) -> None:
        self._bounds, self._policy = bounds, policy
        self._delays = Delays(bounds.upscale_delay_s, bounds.downscale_delay_s)
        self._seen: dict[str, deque[tuple[float, Report]]] = {}
        self.target = bounds.min_replicas
        self.period_s = ASKS * bounds.look_back_period_s

    def report(self, now: float, reports: Mapping[str, Report]) -> None:
        """What each running replica says of its load; those that are not in ``reports`` are gone."""
        self._seen = {name: self._seen.get(name, deque()) for name in reports}
        for name, said in reports.items():
            kept = self._seen[name]
            kept.append((now, said))
            while kept[0][0] < now - self._bounds.look_back_period_s:
                kept.popleft()

    def target_now(self, now: float) -> int:
        """How many replicas there should be, within the bounds."""
        metrics: dict[str, dict[str, float]] = {}
        for name, kept in self._seen.items():
            for metric in kept[-1][1]:
                metrics.setdefault(metric, {})[name] = math.fsum(said[metric] for _, said in kept) / len(kept)
        context = SimpleNamespace(
            deployment_name="verifier",
            aggregated_metrics=metrics,
            target_num_replicas=self.target,
            current_num_replicas=len(self._seen),
        )
        wanted, _ = self._policy(context)
        decided = self._delays.decide(wanted, len(self._seen), self.target, now)
        self.target = min(self._bounds.max_replicas, max(self._bounds.min_replicas, decided))
        return self.target
