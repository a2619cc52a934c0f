"""Answers of a given form: under every strategy, on every link, the tokens of constrained plain decoding; and of that form."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.verifier.service import VerifierService
from speculation.errors import Internal
from speculation.messages import GenerationRequest, Progress
from speculation.sources import SOURCES, STRATEGIES
from speculation.types import FinishReason, Plan, StructuredOutputs
from tests.engine.fakes import PLAIN, collect, request
from tests.lossless import test_strategies
from tests.lossless.test_heads_are_lossless import ANSWER, patient
from tests.lossless.test_strategies import plan_of, verifier
from tests.running.patience import PATIENCE_S
from tests.servers.answer_forms import FORMS
from tests.tiny_models.draft_models import make_parallel_draft
from tests.tiny_models.mtp_layers import alone
from tests.tiny_models.trained_heads import BLOCK_KINDS, MODELS, make_blocks

PROMPTS = {
    "json": [5, 6, 7, 8, 9, 5, 6, 7],
    "regex": [40, 41, 42] * 6,
    "choice": [17],
    "grammar": [100 + i for i in range(30)],
}
SAMPLING: list[dict[str, Any]] = [
    {"repetition_penalty": 1.1},
    {"temperature": 0.9, "top_p": 0.95, "top_k": 60, "repetition_penalty": 1.2, "presence_penalty": 0.3, "seed": 3},
]
BLEND = (*STRATEGIES["blend"], "retrieval", "semantic", "spectra_core")


def asked(name: str, kind: str, plan: Plan, **sampling: Any) -> GenerationRequest:
    form = FORMS[kind].structured
    return request(name, PROMPTS[kind], plan, **{"max_tokens": 120, "structured_outputs": form, **sampling})


async def answers(
    running: VerifierService, plan: Plan, sampling: dict[str, Any]
) -> dict[str, tuple[list[int], list[Progress]]]:
    wanted = [asked(f"r {kind}", kind, plan, **sampling) for kind in FORMS]
    found = await asyncio.gather(*(collect(running.loop, one) for one in wanted))
    assert all(finished.reason is FinishReason.STOP for _, finished, _ in found), plan
    return {kind: (tokens, steps) for kind, (tokens, _, steps) in zip(FORMS, found, strict=True)}


@pytest.mark.examples(2)
@pytest.mark.parametrize("link", ["in_process", "grpc"])
async def test_every_strategy_gives_the_tokens_of_constrained_plain_decoding(tiny_model: Path, link: str) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    by_grammar: Counter[str] = Counter()
    async with verifier(tiny_model, "real", link, "fixed") as running:
        for sampling in SAMPLING:
            plain = await answers(running, PLAIN, sampling)
            for kind, (tokens, steps) in plain.items():
                assert FORMS[kind].has(tokenizer.decode(tokens)), (kind, sampling)
                assert all(not step.num_drafted for step in steps)
            for sources in [*((source,) for source in SOURCES), BLEND]:
                found = await answers(running, plan_of(sources), sampling)
                for kind, (tokens, steps) in found.items():
                    assert tokens == plain[kind][0], (kind, sources, sampling)
                    by_grammar[kind] += sum(step.accepted_sources.count("grammar") for step in steps)
    assert set(by_grammar) == set(FORMS)


async def test_garbage_and_drafts_of_two_origins_change_no_token(tiny_model: Path) -> None:
    plan = Plan(strategy="random", sources=("random", "spectra_core"), max_nodes=24, observe_top_k=6)
    async with verifier(tiny_model, "both", "in_process", "measured") as running:
        for sampling in SAMPLING:
            plain = await answers(running, PLAIN, sampling)
            found = await answers(running, plan, sampling)
            assert {kind: tokens for kind, (tokens, _) in found.items()} == {kind: own for kind, (own, _) in plain.items()}


async def test_under_the_rejection_rule(tiny_model: Path) -> None:
    """Greedily the same tokens; sampled, at least of that form: exactness is enumerated below."""
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    async with verifier(tiny_model, "real", "in_process", "fixed") as running:
        plain = await answers(running, PLAIN, {})
        for sources in (BLEND, ("draft_model",), ("eagle3",), ("mtp",)):
            plan = plan_of(sources, acceptance="rejection")
            greedy = await answers(running, plan, {})
            assert {kind: tokens for kind, (tokens, _) in greedy.items()} == {kind: own for kind, (own, _) in plain.items()}
            for kind, (tokens, _) in (await answers(running, plan, SAMPLING[1])).items():
                assert FORMS[kind].has(tokenizer.decode(tokens)), (kind, sources)


async def test_it_goes_on_after_what_another_verifier_has_committed(tiny_model: Path) -> None:
    async with verifier(tiny_model, "real", "in_process", "fixed") as running:
        plain = await answers(running, PLAIN, SAMPLING[1])
        for kind, (tokens, _) in plain.items():
            for cut in (1, len(tokens) // 2, len(tokens) - 1):
                moved = replace(asked("moved", kind, plan_of(BLEND), **SAMPLING[1]), committed=tuple(tokens[:cut]))
                rest, finished, _ = await collect(running.loop, moved)
                assert [*tokens[:cut], *rest] == tokens
                assert finished.reason is FinishReason.STOP
        wrong = replace(asked("wrong", "choice", PLAIN), committed=(5, 6))
        with pytest.raises(Internal, match="grammar"):
            await collect(running.loop, wrong)
        assert (await answers(running, PLAIN, SAMPLING[1]))["json"][0] == plain["json"][0]


async def test_log_probabilities_are_those_of_the_logits_as_they_are(tiny_model: Path) -> None:
    async with verifier(tiny_model, "real", "in_process", "fixed") as running:
        plain = await answers(running, PLAIN, {"logprobs": 3})
        blend = await answers(running, plan_of(BLEND), {"logprobs": 3})
        for kind, (tokens, steps) in plain.items():
            entries = [entry for step in steps for entry in step.logprobs]
            assert [entry.token_id for entry in entries] == tokens
            # What the grammar bars is likely all the same.
            assert any(entry.token_id not in entry.top_ids for entry in entries)
            others = [entry for step in blend[kind][1] for entry in step.logprobs]
            assert [entry.top_ids for entry in others] == [entry.top_ids for entry in entries]


async def test_a_cut_answer_says_so(tiny_model: Path) -> None:
    async with verifier(tiny_model, "real", "in_process", "fixed") as running:
        for plan in (PLAIN, plan_of(BLEND)):
            tokens, finished, _ = await collect(running.loop, asked("cut", "json", plan, max_tokens=9))
            assert len(tokens) == 9
            assert finished.reason is FinishReason.LENGTH


# A form that leaves a choice everywhere: what is accepted has been drafted by a model, none of it by the grammar.
LETTERS = StructuredOutputs(kind="regex", text="[a-zA-Z ,.]{200}")
_SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_tokens": ANSWER, "structured_outputs": LETTERS}


async def accepted(running: VerifierService, names: Sequence[str]) -> None:
    """Answer in letters by each of the sources until drafts of it have been accepted: always as plain decoding does."""
    taken, numbers = running.loop.stats.accepted_by_source, itertools.count()

    async def said(plan: Plan) -> list[list[int]]:
        # Names of their own: a draft that comes late for an answer before would be none for this one.
        wanted = [request(f"r{next(numbers)}", prompt, plan, **_SAMPLED) for prompt in test_strategies.PROMPTS]
        return [tokens for tokens, _, _ in await asyncio.gather(*(collect(running.loop, one) for one in wanted))]

    plain = await said(PLAIN)
    for name in names:
        async with asyncio.timeout(PATIENCE_S):
            # The model is loaded when a request first names it.
            while not taken.get(name):
                assert await said(plan_of((name,))) == plain, name
    assert not running.loop.stats.drafts_malformed


_HEADS = (*MODELS, "draft_model")


@pytest.mark.parametrize(
    ("link", "names"),
    [
        ("grpc", ("eagle3", "mtp", "medusa", "draft_model")),
        pytest.param("grpc", _HEADS, marks=pytest.mark.exhaustive),
        pytest.param("in_process", _HEADS, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
async def test_what_models_draft_is_accepted(tiny_model: Path, link: str, names: Sequence[str]) -> None:
    async with patient(tiny_model, link) as running:
        await accepted(running, names)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [kind for kind in BLOCK_KINDS if kind != "DFlash"])
async def test_what_other_forms_draft_is_accepted(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    """A block of each kind; a draft model with a mask token, and three MTP layers."""
    others = {"dflash": make_blocks(tiny_model, tmp_path / "block", kind=kind)}
    if kind == "DSpark":
        others["draft_model"] = make_parallel_draft(tiny_model, tmp_path / "draft")
        others["mtp"] = alone(tiny_model, tmp_path / "mtp", layers=3)
    async with verifier(tiny_model, "real", "in_process", "fixed", draft_deadline_s=5.0, instead=others) as running:
        await accepted(running, tuple(others))
