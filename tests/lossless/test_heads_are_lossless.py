"""Drafters of hidden states change no token: greedily, with the request's own noise, and with drafts drawn from q."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from cluster.models.drafters import linear_kernels
from services.drafter.heads.eagle.head import FeatureHead
from services.drafter.heads.eagle.source import FeatureSource, TreeForm
from services.drafter.heads.files.target_rows import TargetRows
from services.drafter.heads.products import HeadProducts
from services.drafter.sources.interfaces import DraftWanted
from services.machine.device_states import DeviceStates
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from services.verifier.service import VerifierService
from speculation.types import Plan
from tests.drafters.feature_sources import EAGLE, known, opening
from tests.engine.fakes import collect, request
from tests.lossless.enumeration import VOCAB, Oracle, Output, distance, outcomes, plain
from tests.lossless.test_enumeration import EXACT, by_rejection
from tests.lossless.test_strategies import PROMPTS, plain_answers, plan_of, verifier
from tests.tiny_models.draft_models import make_parallel_draft
from tests.tiny_models.mtp_layers import alone
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.trained_heads import MODELS, STREAM_FORMS, make_blocks

# Answers to two of the prompts have crossed the border of a block by then.
ANSWER = 16


def patient(
    folder: Path, link: str, drafting_for: Path | None = None, dtype: Literal["float32", "int8"] = "float32"
) -> AbstractAsyncContextManager[VerifierService]:
    """A verifier that waits for its drafters."""
    return verifier(folder, "real", link, "fixed", draft_deadline_s=5.0, drafting_for=drafting_for, dtype=dtype)


async def drafted(running: VerifierService, plan: Plan, sampling: Mapping[str, object]) -> list[list[int]]:
    """The answers, with drafts of the plan's heads among what was verified."""
    fields = {"max_tokens": ANSWER, "ignore_eos": True, **sampling}
    verified = running.loop.stats.nodes_by_source

    def by_heads() -> int:
        return sum(verified.get(name, 0) for name in (*MODELS, "draft_model") if name in plan.sources)

    before = by_heads()
    # The model is loaded when a request first names it, and nobody waits long for one that is seldom right.
    while by_heads() < before + 20:
        await collect(running.loop, request("first", [17, 5], plan, **fields))
    wanted = [request(f"r{i}", prompt, plan, **fields) for i, prompt in enumerate(PROMPTS)]
    results = await asyncio.gather(*(collect(running.loop, one) for one in wanted))
    assert not running.loop.stats.drafts_malformed
    return [tokens for tokens, _, _ in results]


@pytest.mark.examples(6)
@pytest.mark.parametrize("link", ["in_process", "grpc"])
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.8, "top_p": 0.9, "seed": 3, "presence_penalty": 0.5}, {}, {"temperature": 1.0, "seed": 5}],
    ids=str,
)
async def test_no_token_changes(tiny_model: Path, link: str, sampling: dict[str, object]) -> None:
    expected = [tokens[:ANSWER] for tokens in await plain_answers(tiny_model, sampling)]
    async with patient(tiny_model, link) as running:
        for name in MODELS:
            assert await drafted(running, plan_of((name,)), sampling) == expected, name
        for name in ("fspad", "mtp", "medusa"):
            blended = plan_of(("suffix", "recycling", name))
            assert await drafted(running, blended, sampling) == expected, name


@pytest.mark.examples(2)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}], ids=str)
async def test_states_stay_where_the_target_made_them(
    tiny_model: Path, sampling: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter in the verifier's process and on its device: nothing fetches them, and heads draft as ever."""

    fetched, of_device = [], DeviceStates.__bytes__
    monkeypatch.setattr(DeviceStates, "__bytes__", lambda self: fetched.append(len(self)) or of_device(self))
    expected = [tokens[:ANSWER] for tokens in await plain_answers(tiny_model, sampling)]
    async with verifier(tiny_model, "real", "in_process", "fixed", draft_deadline_s=5.0, states_stay=True) as running:
        for name in MODELS:
            assert await drafted(running, plan_of((name,)), sampling) == expected, name
        blended = plan_of(("suffix", "recycling", "fspad"))
        assert await drafted(running, blended, sampling) == expected
    assert not fetched, "states were copied to the host"


@pytest.mark.exhaustive
@pytest.mark.parametrize("link", ["grpc", "in_process"])
async def test_a_drafter_for_another_revision_of_the_target_costs_speed_alone(
    tiny_model: Path, tmp_path: Path, link: str
) -> None:
    other = make_tiny_model(tmp_path / "other", initializer_range=0.3)
    async with patient(tiny_model, link, other) as running:
        for sampling in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}):
            expected = [tokens[:ANSWER] for tokens in await plain_answers(tiny_model, sampling)]
            for name in MODELS:
                assert await drafted(running, plan_of((name,)), sampling) == expected, name


@pytest.mark.examples(2)
@pytest.mark.parametrize("link", ["grpc", "in_process"])
async def test_other_forms_that_guess_in_one_pass(tiny_model: Path, tmp_path: Path, link: str) -> None:
    """A draft model with a mask token (PARD), and a block whose rows know the token before (DSpark)."""
    others = {
        "draft_model": make_parallel_draft(tiny_model, tmp_path / "draft"),
        "dflash": make_blocks(tiny_model, tmp_path / "block", kind="DSpark"),
    }
    certain: dict[str, object] = {"temperature": 0.7, "top_k": 1, "seed": 2}
    async with verifier(tiny_model, "real", link, "fixed", draft_deadline_s=5.0, instead=others) as running:
        for sampling in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 3, "presence_penalty": 0.5}):
            expected = [tokens[:ANSWER] for tokens in await plain_answers(tiny_model, sampling)]
            for sources in (("draft_model",), ("dflash",), ("suffix", "recycling", "dflash")):
                assert await drafted(running, plan_of(sources), sampling) == expected, sources
        expected = [tokens[:ANSWER] for tokens in await plain_answers(tiny_model, certain)]
        for name in others:
            assert await drafted(running, plan_of((name,), acceptance="rejection"), certain) == expected, name


@pytest.mark.examples(6)
@pytest.mark.parametrize("link", ["grpc", "in_process"])
@pytest.mark.parametrize("kind", ["DFlash2", "Domino", "JetSpec"])
async def test_other_block_drafters(tiny_model: Path, tmp_path: Path, link: str, kind: str) -> None:
    """With convolutions and a selector, with a recurrent cell, and with rows that see those before them alone."""
    block = {"dflash": make_blocks(tiny_model, tmp_path / "block", kind=kind)}
    certain: dict[str, object] = {"temperature": 0.7, "top_k": 1, "seed": 2}
    async with verifier(tiny_model, "real", link, "fixed", draft_deadline_s=5.0, instead=block) as running:
        for sampling in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 3, "presence_penalty": 0.5}):
            expected = [tokens[:ANSWER] for tokens in await plain_answers(tiny_model, sampling)]
            assert await drafted(running, plan_of(("dflash",)), sampling) == expected
        expected = [tokens[:ANSWER] for tokens in await plain_answers(tiny_model, certain)]
        assert await drafted(running, plan_of(("dflash",), acceptance="rejection"), certain) == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["DFlash", "DSpark"])
async def test_trees_of_128_nodes_of_a_block(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    sizes, begin = [0], TransformersTarget.begin

    def noting(target: TransformersTarget, batch: Sequence[Rows], *, whole: bool = False) -> None:
        sizes.extend(len(rows.parents) for rows in batch)
        begin(target, batch, whole=whole)

    block = {"dflash": make_blocks(tiny_model, tmp_path / "block", kind=kind)}
    plan = replace(plan_of(("dflash",)), max_nodes=128)
    large: dict[str, Any] = {"max_nodes": 128, "max_batched_tokens": 600, "draft_deadline_s": 5.0}
    for sampling in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 3, "presence_penalty": 0.5}):
        expected = [tokens[:ANSWER] for tokens in await plain_answers(tiny_model, sampling)]
        with monkeypatch.context() as patch:
            patch.setattr(TransformersTarget, "begin", noting)
            async with verifier(tiny_model, "real", "grpc", "fixed", instead=block, **large) as running:
                assert await drafted(running, plan, sampling) == expected
    assert max(sizes) == 128


@pytest.mark.exhaustive
@pytest.mark.parametrize("link", ["grpc", "in_process"])
async def test_several_mtp_layers(tiny_model: Path, tmp_path: Path, link: str) -> None:
    """Each guesses a token further ahead."""
    layers = {"mtp": alone(tiny_model, tmp_path / "mtp", layers=3)}
    certain: dict[str, object] = {"temperature": 0.7, "top_k": 1, "seed": 2}
    async with verifier(tiny_model, "real", link, "fixed", draft_deadline_s=5.0, instead=layers) as running:
        for sampling in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 3, "presence_penalty": 0.5}):
            expected = [tokens[:ANSWER] for tokens in await plain_answers(tiny_model, sampling)]
            for sources in (("mtp",), ("suffix", "recycling", "mtp")):
                assert await drafted(running, plan_of(sources), sampling) == expected, sources
        expected = [tokens[:ANSWER] for tokens in await plain_answers(tiny_model, certain)]
        assert await drafted(running, plan_of(("mtp",), acceptance="rejection"), certain) == expected


@pytest.mark.examples(6)
@pytest.mark.parametrize("link", ["in_process", "grpc"])
@pytest.mark.parametrize("form", STREAM_FORMS, ids=str)
async def test_streams_in_the_targets_own_pass(tiny_model: Path, link: str, form: tuple[int, ...]) -> None:
    """One pass verifies the last tree and computes what the next one is drafted from; with and without two steps beside."""
    certain: dict[str, object] = {"temperature": 0.7, "top_k": 1, "seed": 2}
    async with patient(tiny_model, link) as running:
        for sampling in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 3, "presence_penalty": 0.5}):
            expected = [tokens[:ANSWER] for tokens in await plain_answers(tiny_model, sampling)]
            for sources in (("streaming",), ("suffix", "recycling", "streaming")):
                plan = replace(plan_of(sources), observe_layers=form)
                assert await drafted(running, plan, sampling) == expected, sources
        plan = replace(plan_of(("streaming",), acceptance="rejection"), observe_layers=form)
        expected = [tokens[:ANSWER] for tokens in await plain_answers(tiny_model, certain)]
        assert await drafted(running, plan, certain) == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize(("link", "dtype"), [("grpc", "float32"), ("in_process", "int8")])
async def test_rejection_with_one_possible_token_is_plain_decoding(
    tiny_model: Path, link: str, dtype: Literal["float32", "int8"]
) -> None:
    """With top_k 1 the target's distribution is certain, while the drafts are drawn from all of q."""
    sampling: dict[str, object] = {"temperature": 0.7, "top_k": 1, "seed": 2}
    expected = [tokens[:ANSWER] for tokens in await plain_answers(tiny_model, sampling)]
    async with patient(tiny_model, link, dtype=dtype) as running:
        for name in MODELS:
            assert await drafted(running, plan_of((name,), acceptance="rejection"), sampling) == expected, name


@pytest.mark.examples(2)
@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize(("temperature", "rounded"), [(0.6, False), (1.5, True)])
def test_sampled_chains_are_lossless_under_rejection(length: int, temperature: float, rounded: bool) -> None:
    """Every outcome of the draws and of the rule's coins, with the chains that the source really sends."""
    torch.manual_seed(3)
    config = replace(EAGLE, vocab_size=VOCAB, draft_vocab_size=VOCAB)
    head = FeatureHead(config, TargetRows.of(torch.randn(VOCAB, config.hidden_size))).requires_grad_(False)
    if rounded and (make := linear_kernels()) is not None:
        head.multiply_by(HeadProducts(make, rounded=True))
    drawn = set()

    def run(oracle: Oracle) -> Output:
        source = FeatureSource(
            "eagle", head, window=64, form=TreeForm(steps=length - 1), draw=lambda q: oracle.choose(np.asarray(q).tolist())
        )
        session = source.open(opening((3, 1, 2), temperature=temperature, sampled=True))
        # Unlikely paths are drafted, too: their length must not depend on what was drawn.
        (tree,) = source.draft([DraftWanted(session=session, max_nodes=8, min_probability=0.5, states=known(range(2)))])
        assert len(tree) == length == len(tree.proposals)
        drawn.add(tree.tokens)
        return by_rejection(tree, oracle)

    assert distance(outcomes(run), plain()) < EXACT
    assert len(drawn) == VOCAB**length
