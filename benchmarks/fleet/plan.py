"""Plans for many GPUs: what runs beside the verifiers, how full it is, and which part is full first.

What a request, a piece of an answer, a draft and a replica cost the other components was measured (component_costs.json, by
``python -m lab.component_cost``); how fast the verifiers are comes from a cost table, which for H100s is computed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench.tables import Table
from benchmarks.fleet.cost_tables import Hardware
from benchmarks.fleet.step_pace import BLEND, StepPace
from cluster.ray import scaling
from speculation.errors import ConfigurationError

MEASURED = Path(__file__).with_name("component_costs.json")
# Share of a core that a process of Python should use: the limit of cluster.ray.scaling for drafters, taken for all here.
BUSY = 0.7
# A retrieval service asks Redis once in so many seconds whether another index is live (retrieval_index.store).
_ASKS_REDIS_S = 2.5
# A look-up of a draft's suffixes, as the sources of drafts make them.
_LOOK_UPS = 1.0
# Mean tokens of an answer, of the simulated day's traffic.
_ANSWER = 743.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentCosts:
    """Seconds of a core.

    Attributes:
        router_request_s: of a router for a request, its text tokenised and its first piece left out.
        router_piece_s: of a router for a piece of an answer: what one pass gives to one request.
        drafter_draft_s: of a drafter for a draft.
        look_up_s: of a retrieval service for a look-up.
        redis_command_s: of Redis for a question whether the index has changed.
        controller_replica_s: of Serve's controller in a second, for each replica.
        controller_idle_s: of it in a second, besides.
        gcs_replica_s: of Ray's control store, likewise.
        gcs_idle_s: likewise.
        choice: by the number of verifiers: ``choice_s`` of a router to choose one, ``ring_s`` to make a new ring.
        machine: where it was measured.
    """

    router_request_s: float
    router_piece_s: float
    drafter_draft_s: float
    look_up_s: float
    redis_command_s: float
    controller_replica_s: float
    controller_idle_s: float
    gcs_replica_s: float
    gcs_idle_s: float
    choice: Mapping[int, Mapping[str, float]]
    machine: str

    def of_choice(self, what: str, verifiers: int) -> float:
        """``choice_s`` or ``ring_s``, on straight lines between and beyond what was measured."""
        known = sorted(self.choice)
        right = next((index for index, count in enumerate(known) if count >= verifiers and index), len(known) - 1)
        low, high = known[right - 1], known[right]
        begin, end = self.choice[low][what], self.choice[high][what]
        return max(0.0, begin + (end - begin) * (verifiers - low) / (high - low))


def read_component_costs(path: Path = MEASURED) -> ComponentCosts:
    """What ``lab.component_cost`` printed.

    Raises:
        ConfigurationError: the file is none of its.
    """
    try:
        content: Any = json.loads(path.read_text())
        machine = content["machine"]
        numbers = {
            name: max(0.0, float(content[name])) for name in ComponentCosts.__dataclass_fields__ if name.endswith("_s")
        }
        return ComponentCosts(
            choice={int(count): entry for count, entry in content["choice"].items()},
            machine=f"{machine['processor']}, {machine['cores']} cores",
            **numbers,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"not what python -m lab.component_cost prints ({error!r})", field=path) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetPlan:
    """A fleet at the load at which the policy would ask for one verifier more.

    Attributes:
        requests_per_s: of all verifiers, as is ``tokens_per_s``.
        streams: open at a time.
        processes: name -> how many it takes, each ``BUSY`` busy at most.
        single: name -> share of a core that a process uses of which there is one.
        choice_share: of the routers' time that goes to choosing a verifier.
        ring_s: seconds for which a router stands still when a verifier comes or goes.
    """

    gpus: int
    verifiers: int
    requests_per_s: float
    tokens_per_s: float
    streams: float
    processes: Mapping[str, int]
    single: Mapping[str, float]
    choice_share: float
    ring_s: float

    @property
    def bottleneck(self) -> str:
        """Which of the processes that exist once is the fullest, and how full."""
        name = max(self.single, key=self.single.__getitem__)
        return f"{name}, {self.single[name]:.0%} of a core"


def plan_fleet(
    gpus: int,
    hardware: Hardware,
    costs: ComponentCosts,
    *,
    prompt: float = 2284.0,
) -> FleetPlan:
    """A plan for so many GPUs.

    Args:
        prompt: mean tokens of a prompt that are not cached; the default is what the simulated day's traffic has.

    Raises:
        ConfigurationError: there are too few GPUs for one verifier.
    """
    verifiers = gpus // hardware.gpus
    if not verifiers:
        raise ConfigurationError(f"a verifier of {hardware.name} takes {hardware.gpus}", field="--gpus", value=gpus)
    each, streams, tokens = _one_verifier(hardware, prompt)
    requests, pieces = verifiers * each, verifiers * each * _ANSWER / tokens
    choosing = requests * costs.of_choice("choice_s", verifiers)
    routing = requests * costs.router_request_s + pieces * costs.router_piece_s + choosing
    processes = {
        "routers": max(_processes(routing), math.ceil(scaling.routers({"streams": [verifiers * streams]}, 1, 1))),
        "drafters": _processes(pieces * costs.drafter_draft_s),
        "retrieval": _processes(_LOOK_UPS * pieces * costs.look_up_s),
    }
    replicas = verifiers + sum(processes.values())
    return FleetPlan(
        gpus=gpus,
        verifiers=verifiers,
        requests_per_s=requests,
        tokens_per_s=requests * _ANSWER,
        streams=verifiers * streams,
        processes=processes,
        single={
            "Serve's controller": costs.controller_idle_s + replicas * costs.controller_replica_s,
            "Ray's control store": costs.gcs_idle_s + replicas * costs.gcs_replica_s,
            "Redis": processes["retrieval"] / _ASKS_REDIS_S * costs.redis_command_s,
        },
        choice_share=choosing / routing if routing else 0.0,
        ring_s=costs.of_choice("ring_s", verifiers),
    )


def _processes(cores: float) -> int:
    return max(1, math.ceil(cores / BUSY))


def _one_verifier(hardware: Hardware, prompt: float) -> tuple[float, float, float]:
    """Requests per second, streams, and tokens of a pass, with as many slots taken as the policy allows."""
    pace = StepPace(hardware, BLEND)
    slots, room = hardware.max_num_seqs, hardware.kv_cache_tokens
    full = next(
        count
        for count in range(1, slots + 1)
        if scaling.verifiers({"rows": [count / slots], "cache": [count * (prompt + _ANSWER / 2) / room]}, 1, 1) > 1
    )
    count = max(1, full - 1)
    step = pace.steps[count]
    step_s = step.base_s + step.key_s * count / hardware.gpus * (prompt + _ANSWER / 2)
    # Prompts take their share of the time: rate = decoding's rate * (1 - rate * seconds of a prompt).
    decoded = count * step.tokens / (step_s * _ANSWER)
    prompt_s = prompt / step.prompt_rows * step.prompt_s / hardware.gpus
    return decoded / (1 + decoded * prompt_s), count, step.tokens


def plan_tables(plans: Sequence[tuple[FleetPlan, FleetPlan]], hardware: Hardware, price: float) -> list[Table]:
    """What each plan takes, and what one GPU (or verifier) more brings.

    Args:
        plans: of so many GPUs, and of one verifier more.
    """
    fleet = Table(
        title="Fleets",
        columns=(
            "GPUs", "verifiers", "requests/s", "tokens/s", "streams", "routers", "drafters", "retrieval",
            "controller", "control store", "Redis", "choosing", "new ring ms",
        ),
        rows=tuple(_plan_row(plan) for plan, _ in plans),
        note=f"verifiers: {hardware.source}; at the load at which the policy asks for one more",
    )  # fmt: skip
    more = Table(
        title=f"What {hardware.gpus} GPU{'s' * (hardware.gpus > 1)} more bring",
        columns=("GPUs", "requests/s", "tokens/s", "of what is there", "$/hour", "and takes", "first to be full"),
        rows=tuple(
            (
                str(plan.gpus),
                f"{one.requests_per_s - plan.requests_per_s:.2f}",
                f"{one.tokens_per_s - plan.tokens_per_s:,.0f}",
                f"{one.tokens_per_s / plan.tokens_per_s - 1:.2%}",
                f"{price * hardware.gpus:.2f}",
                ", ".join(
                    f"{one.processes[name] - count} {name}"
                    for name, count in plan.processes.items()
                    if one.processes[name] > count
                )
                or "nothing else",
                plan.bottleneck,
            )
            for plan, one in plans
        ),
    )
    return [fleet, more]


def _plan_row(plan: FleetPlan) -> tuple[str, ...]:
    return (
        str(plan.gpus),
        str(plan.verifiers),
        f"{plan.requests_per_s:,.1f}",
        f"{plan.tokens_per_s:,.0f}",
        f"{plan.streams:,.0f}",
        *(str(plan.processes[name]) for name in ("routers", "drafters", "retrieval")),
        *(f"{share:.2%}" for share in plan.single.values()),
        f"{plan.choice_share:.1%}",
        f"{1e3 * plan.ring_s:.1f}",
    )
