"""Answers of verifiers that keep keys and values in eight bits move between those that do, over any ranks, with equal tokens;
a verifier that keeps other numbers refuses what they have begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import outrider
from services.verifier import service
from services.verifier.config import TargetConfig
from speculation.errors import NotBegun
from tests.chaos.cells import ASKED
from tests.chaos.test_other_weights import Both, broken_off, two_verifiers
from tests.engine.fakes import PLAIN
from tests.engine.layouts import Layout
from tests.kernels.kernels_here import needs_kernels
from tests.lossless import test_ranks_in_services as services
from tests.lossless.test_lora_is_lossless import DRAFTED, PROMPTS, SAMPLING, asked, said, verifier

pytestmark = needs_kernels

ROUNDED = "verifier.kv_cache_dtype=fp8"


@services.over
async def test_an_answer_moves_between_verifiers_that_round_alike(tiny_model: Path, layout: Layout) -> None:
    async with verifier(tiny_model, {}) as unrounded:
        others = [await said(unrounded, asked("", PROMPTS[1], PLAIN, **sampling)) for sampling in SAMPLING]
    async with (
        verifier(tiny_model, {}, kv_cache_dtype="fp8") as one,
        # Another name of the same.
        verifier(tiny_model, {}, kv_cache_dtype="fp8_e4m3", **asdict(layout)) as two,
    ):
        for sampling, other in zip(SAMPLING, others, strict=True):
            wanted = asked("", PROMPTS[1], DRAFTED, **sampling)
            answer = await said(one, replace(wanted, request_id=f"{wanted.request_id}.plain", plan=PLAIN))
            assert answer != other, "rounding must matter for this test to mean anything"
            await services.moves(one, two, wanted, answer)


Arithmetic = Callable[..., str]


def whatever_is_kept(own: Arithmetic) -> Arithmetic:
    """The arithmetic as it would be told by who forgets how keys and values are kept."""

    def told(target: Any, config: TargetConfig, *weights: Any) -> str:
        return own(target, replace(config, kv_cache_dtype="auto"), *weights)

    return told


@pytest.mark.parametrize("first", ["auto", "fp8"])
@pytest.mark.parametrize("forgotten", [False, True], ids=["", "a planted fault is seen"])
async def test_none_goes_on_with_other_numbers(
    tiny_model: Path, first: Any, forgotten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forgotten:
        monkeypatch.setattr(service, "arithmetic_of", whatever_is_kept(service.arithmetic_of))
    second: Any = "fp8" if first == "auto" else "auto"
    async with (
        verifier(tiny_model, {}, kv_cache_dtype=first) as one,
        verifier(tiny_model, {}, kv_cache_dtype=second, ranks=2) as two,
    ):
        wanted = asked("", PROMPTS[1], DRAFTED)
        answer, other = [await said(each, replace(wanted, request_id="plain", plan=PLAIN)) for each in (one, two)]
        begun, arithmetic = await services.broken_off(one, wanted, 20)
        moved = replace(wanted, request_id="moved", committed=tuple(begun), arithmetic=arithmetic)
        if forgotten:
            # Half of one and half of the other.
            assert [*begun, *await said(two, moved)] not in (answer, other)
            return
        with pytest.raises(NotBegun):
            await said(two, moved)
        assert [*begun, *await said(one, replace(moved, request_id="back"))] == answer
        assert await said(two, replace(wanted, request_id="own")) == other


@pytest.mark.exhaustive
async def test_a_verifier_that_dies_leaves_its_answers_to_one_that_rounds(tiny_model: Path) -> None:
    """Through a router, drafts and all, from one process to two ranks or back."""
    seen = Both()
    own = ((ROUNDED,), (ROUNDED, "verifier.tensor_parallel_size=2"))
    async with two_verifiers((tiny_model, tiny_model), own=own) as (address, both):
        assert both[0].arithmetic == both[1].arithmetic
        users, victim = await broken_off(address, both, seen)
        await asyncio.gather(*users)
        assert not seen.errors
        await victim.return_()
        # What both say undisturbed.
        for _ in range(2):
            again = Both()
            await asyncio.gather(*(again.watch(address, name) for name in ASKED))
            assert not again.errors and again.shown == seen.shown


@pytest.mark.exhaustive
async def test_or_ends_in_one_error_where_the_other_does_not_round(tiny_model: Path) -> None:
    seen = Both()
    async with two_verifiers(
        (tiny_model, tiny_model), "router.migration_timeout_s=2", own=((ROUNDED,), ("verifier.tensor_parallel_size=2",))
    ) as (address, both):
        users, victim = await broken_off(address, both, seen)
        await asyncio.gather(*users)
        (other,) = (served for served in both if served is not victim)
        assert seen.errors and other.arithmetic != victim.arithmetic
        for error in seen.errors.values():
            assert isinstance(error, outrider.Unavailable)
            assert victim.arithmetic in str(error) and other.arithmetic in str(error)
