"""What a message about an answer's progress has beside its tokens, and that a long one lets others have their turns."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from services.links import serialised
from services.links.codec import verification
from speculation.messages import Finished, Progress
from speculation.types import FinishReason, TokenLogprobs
from tests.unit.links.test_codec import PROGRESS


@pytest.mark.parametrize("saved_s", [0.125, -0.25, 0.0])
def test_what_drafting_saved_or_cost_travels(saved_s: float) -> None:
    """Measured, so no part of what makes two steps equal: ``test_codec`` does not see it."""
    wire = verification.encode_generation_event(replace(PROGRESS, saved_s=saved_s))
    read = verification.decode_generation_event(type(wire).FromString(wire.SerializeToString()))
    assert isinstance(read, Progress)
    assert read.saved_s == saved_s


def test_the_arithmetic_travels() -> None:
    wire = verification.encode_generation_event(replace(PROGRESS, arithmetic="0123456789abcdef"))
    read = verification.decode_generation_event(wire)
    assert isinstance(read, Progress)
    assert read.arithmetic == "0123456789abcdef"


async def test_others_have_their_turns_while_a_prompts_log_probabilities_travel() -> None:
    scores = tuple(
        TokenLogprobs(token_id=7 + at, logprob=-0.5, top_ids=(7, 8), top_logprobs=(-0.5, -1.5)) for at in range(1000)
    )
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    for event in (replace(PROGRESS, prompt_logprobs=scores), PROGRESS, Finished(reason=FinishReason.STOP)):
        assert await serialised.read_event(await serialised.write_event(event)) == event
    beside.cancel()
    assert turns >= 2 * (1000 // 128)
