"""What a drafter's service is told of sessions, and hidden states that name their layer and position."""

from __future__ import annotations

import struct

from services.drafter.service import DrafterService
from speculation.messages import Draft, OpenSession, StepReport
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.types import Features, Observation
from tests.drafters.model_source import LAYERS, NAME

TEXT = (1, 2, 3, 1, 2)
BOTH = ("prompt_lookup", NAME)


def opening(name: str, sources: tuple[str, ...] = BOTH, tokens: tuple[int, ...] = TEXT, tenant: str = "") -> OpenSession:
    return OpenSession(
        session_id=name, tokens=tokens, prompt_length=len(tokens), sources=sources, max_nodes=8, tenant=tenant
    )


def report(
    name: str, committed: tuple[int, ...], before: tuple[int, ...] = TEXT, features: Features | None = None
) -> StepReport:
    return StepReport(
        session_id=name,
        committed=committed,
        length=len(before) + len(committed),
        prefix_hash=extend_hash(EMPTY_HASH, before + committed),
        accepted_path=(),
        max_nodes=8,
        observation=None if features is None else Observation(features=features),
    )


async def rest(service: DrafterService, name: str) -> list[Draft]:
    return [draft async for draft in service.further(name)]


def rows(start: int, stop: int, layers: tuple[int, ...] = LAYERS) -> Features:
    """Two numbers for each layer: the layer and the position."""
    numbers = [number for position in range(start, stop) for layer in layers for number in (layer, position)]
    return Features(
        data=struct.pack(f"<{len(numbers)}e", *numbers),
        rows=stop - start,
        width=2 * len(layers),
        dtype="float16",
        start=start,
        layers=layers,
    )


def row(position: int) -> bytes:
    return rows(position, position + 1).data
