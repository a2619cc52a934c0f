"""``outrider bench autoscale``: a day of traffic against a fleet that follows the load, and against fleets of a fixed size.

Runs on a simulated clock, with the code that decides when it serves (``cluster.ray.scaling``, ``cluster.verifiers.choice``)
and costs of passes from a table (``benchmarks.fleet.cost_tables``). It says what the policy and the choice do with the load;
it measures no machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fleet.cost_tables import Hardware
from benchmarks.fleet.outcomes import FleetOutcome, outcome
from benchmarks.fleet.recorded_traffic import read_arrivals
from benchmarks.fleet.serve_scaling import Autoscaler, Policy
from benchmarks.fleet.simulation import FleetConfig, FleetSimulation
from benchmarks.fleet.step_pace import BLEND, StepPace
from benchmarks.fleet.traffic import Arrival, TrafficConfig, draw
from cluster.ray import scaling
from cluster.settings.placement import Autoscaling

AUTOSCALED = "autoscaled"
# Seeds of machines are others than those of requests.
_MACHINES = 1_000_003


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoscaleConfig:
    """What is compared.

    Attributes:
        traffic: what is drawn, unless ``recorded`` names a file.
        fixed: sizes of fleets that do not change; empty: some around what the autoscaled one had.
        price: dollars for a GPU and hour.
        acceptance: of the first, second, ... drafted token; empty: plain decoding.
    """

    hardware: Hardware
    traffic: TrafficConfig
    bounds: Autoscaling
    recorded: Path | None = None
    fixed: tuple[int, ...] = ()
    price: float = 3.0
    seed: int = 1
    acceptance: tuple[float, ...] = BLEND
    fleet: FleetConfig = field(default_factory=FleetConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedFleets:
    """All fleets' days, the autoscaled one's first."""

    config: AutoscaleConfig
    requests: int
    prompt_tokens: int
    answer_tokens: int
    outcomes: tuple[FleetOutcome, ...]

    def as_object(self) -> dict[str, Any]:
        """For JSON, with everything that was set."""
        own, hardware = self.config, self.config.hardware
        machine = {name: getattr(hardware, name) for name in hardware.__dataclass_fields__ if name != "costs"}
        return {
            "hardware": machine | {"costs": hardware.costs.as_object()},
            "traffic": asdict(own.traffic) if own.recorded is None else str(own.recorded),
            "bounds": own.bounds.model_dump(),
            "fleet": asdict(own.fleet),
            "price": own.price,
            "seed": own.seed,
            "acceptance": own.acceptance,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "answer_tokens": self.answer_tokens,
            "outcomes": [each.as_object() for each in self.outcomes],
        }


def compare_fleets(
    config: AutoscaleConfig, policy: Policy = scaling.policy, told: Callable[[str], None] = lambda name: None
) -> ComparedFleets:
    """Send the same requests through every fleet.

    Args:
        policy: decides the size of the first.
        told: called with each fleet's name before its day.

    Raises:
        ConfigurationError: the recording cannot be read.
    """
    arrivals = draw(config.traffic, config.seed) if config.recorded is None else read_arrivals(config.recorded)
    pace = StepPace(config.hardware, config.acceptance)
    told(AUTOSCALED)
    first = one_fleet(config, arrivals, pace, Autoscaler(config.bounds, policy))
    outcomes = [first]
    for size in config.fixed or _around(first):
        told(f"{size} fixed")
        outcomes.append(one_fleet(config, arrivals, pace, size))
    return ComparedFleets(
        config=config,
        requests=len(arrivals),
        prompt_tokens=sum(arrival.prompt for arrival in arrivals),
        answer_tokens=sum(arrival.answer for arrival in arrivals),
        outcomes=tuple(outcomes),
    )


def one_fleet(config: AutoscaleConfig, arrivals: Sequence[Arrival], pace: StepPace, size: int | Autoscaler) -> FleetOutcome:
    """One fleet's day. All have the same machines: they start as fast, and die at the same times."""
    scaler = size if isinstance(size, Autoscaler) else None
    simulation = FleetSimulation(
        arrivals,
        config.hardware,
        pace,
        config.fleet,
        replicas=config.bounds.min_replicas if isinstance(size, Autoscaler) else size,
        scaler=scaler,
        seed=config.seed + _MACHINES,
    )
    simulation.run()
    name = AUTOSCALED if scaler is not None else f"{size} fixed"
    return outcome(name, arrivals, simulation.ends, simulation.gpu_s, config.price, simulation.moments)


def _around(found: FleetOutcome) -> list[int]:
    """From what it had on average to the most that it had, at most four sizes."""
    low = max(1, math.floor(found.mean_running))
    return sorted({low, low + 1, low + 2, max(low, found.most)})


def asked_for(max_num_seqs: int, most: int) -> list[tuple[int, int, int]]:
    """For each number of verifiers: from how many decoding requests on the policy asks for more, below how many for fewer.

    The policy itself is asked, one request at a time; neither cache nor queue ask for any.
    """
    found = []
    for replicas in range(1, most + 1):
        wanted = [
            math.ceil(scaling.verifiers({"rows": [count / max_num_seqs]}, replicas, replicas))
            for count in range(replicas * max_num_seqs + 1)
        ]
        more = next((count for count, number in enumerate(wanted) if number > replicas), len(wanted))
        fewer = sum(max(1, number) < replicas for number in wanted)
        found.append((replicas, more, fewer))
    return found
