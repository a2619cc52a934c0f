"""A soak's component with faults planted: routers say wrong tokens and keep descriptors, verifiers keep memory."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from benchmarks.soak import component
from cluster.verifiers.chosen_verifier import ChosenVerifier
from speculation.messages import Finished, GenerationRequest, Progress

# Of so many pieces one has a wrong token.
ONE_IN = 200
LEAK_MIB_PER_S = 4
_kept: list[object] = []
_pieces = itertools.count(1)
_asked = ChosenVerifier._asked


async def _wrong(self: ChosenVerifier, index: int, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
    _kept.append(os.pipe())
    async with aclosing(_asked(self, index, request)) as events:
        async for event in events:
            if isinstance(event, Progress) and next(_pieces) % ONE_IN == 0:
                *before, last = event.token_ids
                event = replace(event, token_ids=(*before, last - 1 if last else 1))
            yield event


async def _leak() -> None:
    while True:
        await asyncio.sleep(0.25)
        # A zeroed block would not be the process's until it is written to.
        _kept.append(b"x" * (LEAK_MIB_PER_S * 2**20 // 4))


async def _main(spec: component.ComponentSpec) -> None:
    ChosenVerifier._asked = _wrong  # type: ignore[method-assign]
    leaking = asyncio.create_task(_leak()) if spec.role == "verifier" else None
    await component.serve(spec)
    del leaking


def main(arguments: Sequence[str]) -> None:
    """Serve what the one argument says, as ``benchmarks.soak.component``."""
    asyncio.run(_main(component.ComponentSpec.read(arguments[0])))
