"""What the chaos matrix tries: faults of components at moments of streams, and what users ask meanwhile."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import outrider

TOKENS_WANTED = 300
# Share of the tokens that have come when the fault begins.
MOMENTS = {"before the first token": 0.0, "in mid-stream": 0.4, "at the end": 0.95}
# How long a fault lasts at most, in seconds; a process that was killed is started again at once.
FAULT_S = 1.0

# hung: stopped until every stream has ended, then killed.
OF_PROCESSES = ("killed", "frozen", "hung")
# What a process gets no more of: files that grow, descriptors, address space, threads.
LACKS = ("no disk", "no descriptors", "no memory", "no threads")
OF_NETWORKS = ("cut", "stalled", "slow")
# Who stands in front of whom; users come last.
CHAIN = ("retrieval", "drafter", "verifier", "router")
REPLICAS = {"retrieval": 1, "drafter": 1, "verifier": 2, "router": 2}

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"strategy": "blend"},
    "sampled": {"strategy": "blend", "temperature": 0.9, "top_p": 0.9, "seed": 5},
    "penalised": {"strategy": "prompt_lookup", "temperature": 0.7, "seed": 11, "presence_penalty": 0.5},
    "plain": {"strategy": "autoregressive", "temperature": 1.0, "seed": 2},
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One entry of the matrix."""

    component: str
    fault: str
    moment: str
    beside: str = ""

    def __str__(self) -> str:
        return f"{self.component} {self.fault} {self.moment}" + (f", {self.beside}" if self.beside else "")


# What goes on beside a fault: more users than there is room for, or what a component reads again is replaced meanwhile.
OVERLOAD = "overload"
NEW_COMPONENT_CERTIFICATES = "new component certificates"
RELOADS = {
    "router": ("new keys", "new certificate"),
    "retrieval": ("new index", NEW_COMPONENT_CERTIFICATES),
    "drafter": (NEW_COMPONENT_CERTIFICATES,),
    "verifier": (NEW_COMPONENT_CERTIFICATES,),
}
_MID = ("in mid-stream",)

ALL = [
    Cell(*entry)
    for entry in itertools.chain(
        itertools.product(CHAIN, (*OF_PROCESSES, *LACKS, *OF_NETWORKS), MOMENTS),
        itertools.product(("redis",), ("killed", *OF_NETWORKS), MOMENTS),
        itertools.product(CHAIN, (*OF_PROCESSES, *LACKS, *OF_NETWORKS), _MID, (OVERLOAD,)),
        itertools.product(("redis",), ("killed", *OF_NETWORKS), _MID, (OVERLOAD, "new index")),
        *(itertools.product((role,), ("frozen", *LACKS), _MID, what) for role, what in RELOADS.items()),
    )
]


# The same on Ray, whose own processes can fail as well.
RAYS_OWN = ("controller", "agent", "raylet", "gcs_server")
ALL_ON_RAY = [
    *(Cell(*entry) for entry in itertools.product((*CHAIN, "stage"), ("killed", "frozen", "hung"), MOMENTS)),
    *(Cell(*entry, "in mid-stream") for entry in itertools.product(RAYS_OWN, ("killed", "frozen", "hung"))),
]


# Between two nodes of Ray; gone: cut until every stream has ended.
ALL_BETWEEN_NODES = [Cell(*entry) for entry in itertools.product(("link",), ("cut", "gone", "slow"), MOMENTS)]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a run of a cell that is chosen at random, so that it can be repeated.

    Attributes:
        place: which arrangement of components it is for.
        after: tokens of one stream that have come when the fault begins.
        lasts_s: how long it lasts.
        victim: number of the replica that is hit, modulo how many there are.
    """

    cell: Cell
    place: str
    seed: int
    after: int
    lasts_s: float
    victim: int

    @classmethod
    def drawn(cls, cell: Cell, place: str, seed: int) -> Self:
        """The plan of a cell under a seed: the same ones give the same plan."""
        source = random.Random(f"{seed} {place} {cell}")
        share = MOMENTS[cell.moment]
        after = round(TOKENS_WANTED * share) + (source.randrange(TOKENS_WANTED // 25) if share else 0)
        return cls(cell, place, seed, after, FAULT_S * source.uniform(0.5, 1.0), source.randrange(8))

    def written(self) -> dict[str, Any]:
        """As JSON's types; ``read`` is the inverse."""
        return asdict(self)

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Self:
        return cls(**{**fields, "cell": Cell(**fields["cell"])})


def shuffled(cells: Sequence[Cell], seed: int) -> list[Cell]:
    """The order in which a seed tries cells."""
    order = list(cells)
    random.Random(seed).shuffle(order)
    return order


# The same as the first one, over HTTP where the arrangement has it, and those who come beside a fault.
HTTP, CROWD = "over HTTP", tuple(f"crowd {number}" for number in range(16))


def options(name: str) -> dict[str, Any]:
    """What the user of this name asks."""
    name = asked_by(name)
    prompt = [40 + len(name), 41, 42, 43] * 6
    return {"token_ids": prompt, "max_tokens": TOKENS_WANTED, "ignore_eos": True, **ASKED[name]}


def asked_by(name: str) -> str:
    """The entry of ``ASKED`` that the user of this name asks."""
    if name in CROWD:
        return list(ASKED)[CROWD.index(name) % len(ASKED)]
    return "sampled" if name == HTTP else name


async def plain_answers(model: Path) -> dict[str, tuple[int, ...]]:
    """What every stream must show, decoded without drafts in this process."""
    from services.api.config import PublicServerConfig
    from services.api.grpc.server import serve_public
    from tests.servers.service import pipeline

    async with pipeline(model) as running:
        server = await serve_public(running.router, PublicServerConfig(port=0))
        async with outrider.AsyncClient(server.address) as client:
            answers = {
                name: (await client.generate(**{**options(name), "strategy": "autoregressive"})).token_ids for name in ASKED
            }
        await server.stop(0)
    return answers
