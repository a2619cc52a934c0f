"""A router without Ray chooses among verifiers as one on Ray does: by beginnings, by loads, and the next one after a failure."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from cluster.verifiers.chosen_verifier import ChosenVerifier
from speculation.adapters import AdapterOrder
from speculation.errors import NotBegun, ResourceExhausted, Unavailable
from speculation.messages import Finished, GenerationRequest, Progress, ReplayedAnswer, VerifierCard
from speculation.types import FinishReason
from tests.engine.fakes import request


class Scripted:
    """Implements ``VerifierPort``: answers, or is full, or is not there."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        self.asked.append(request)
        if self.error is not None:
            raise self.error
        yield Finished(reason=FinishReason.LENGTH)

    async def describe(self) -> VerifierCard:
        if self.error is not None:
            raise self.error
        return VerifierCard(
            model="m", max_model_len=1, vocab_size=1, running=0, waiting=0, free_blocks=1, total_blocks=1, bit_exact=True
        )

    async def compare(self, request: GenerationRequest, plans: object) -> tuple[ReplayedAnswer, ...]:
        return ()

    async def adapt(self, order: AdapterOrder) -> str:
        raise NotImplementedError

    async def forget(self, tenant: str) -> None:
        raise NotImplementedError


def asked(beginning: int, attempt: int = 0) -> GenerationRequest:
    return replace(request("r", [beginning] * 8), request_id=f"r.{attempt}")


async def answered(link: ChosenVerifier, wanted: GenerationRequest) -> list[object]:
    return [event async for event in link.generate(wanted)]


async def test_one_beginning_has_one_verifier_and_each_attempt_the_next() -> None:
    both = (Scripted(), Scripted())
    link = ChosenVerifier(both)
    for _ in range(3):
        await answered(link, asked(7))
    assert sorted(len(each.asked) for each in both) == [0, 3]
    await answered(link, asked(7, attempt=1))
    assert sorted(len(each.asked) for each in both) == [1, 3]
    for beginning in range(40):
        await answered(link, asked(beginning))
    assert all(len(each.asked) > 8 for each in both)


async def test_where_one_is_full_the_other_is_asked() -> None:
    full, room = Scripted(ResourceExhausted("full", 1.0)), Scripted()
    for order in ((full, room), (room, full)):
        assert await answered(ChosenVerifier(order), asked(7))
    with pytest.raises(ResourceExhausted):
        await answered(ChosenVerifier((full, Scripted(full.error))), asked(7))


async def test_a_new_request_passes_over_one_that_is_gone_and_an_answer_that_moves_does_not() -> None:
    gone, there = Scripted(NotBegun("gone")), Scripted()
    for order in ((gone, there), (there, gone)):
        assert await answered(ChosenVerifier(order), asked(7))
    moving = replace(asked(7), committed=(1,))
    ends = []
    for order in ((gone, there), (there, gone)):
        try:
            ends.append(len(await answered(ChosenVerifier(order), moving)))
        except NotBegun:
            ends.append(0)
    assert sorted(ends) == [0, 1]


async def test_one_that_is_gone_is_described_by_the_other() -> None:
    gone = Scripted(Unavailable("gone"))
    assert (await ChosenVerifier((gone, Scripted())).describe()).model == "m"
    assert len((await ChosenVerifier((gone, Scripted())).service_state()).verifiers) == 1
    with pytest.raises(Unavailable):
        await ChosenVerifier((gone, gone)).describe()
