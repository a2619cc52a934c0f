"""Allowed tokens and bad words: under every source of drafts the tokens of plain decoding, which keep to the rule."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.verifier.service import VerifierService
from speculation.sources import STRATEGIES
from speculation.types import Plan, StructuredOutputs
from tests.engine.fakes import PLAIN, collect, request
from tests.lossless.test_strategies import plan_of, verifier

PROMPT = [5, 6, 7, 8, 9] * 4
FEW = tuple(range(40, 60))
RULES: dict[str, dict[str, Any]] = {
    "allowed": {"allowed_token_ids": FEW},
    "bad words": {"bad_words": ((310,), (117, 173), (173, 121, 95), (129,))},
    "both": {"allowed_token_ids": FEW, "bad_words": ((41,), (40, 42), (43, 43), (50, 51, 52)), "repetition_penalty": 0.8},
}
SAMPLING: list[dict[str, Any]] = [{}, {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.3, "seed": 3}]
BLEND = (*STRATEGIES["blend"], "retrieval", "semantic", "spectra_core")


async def answers(running: VerifierService, plan: Plan, sampling: dict[str, Any]) -> dict[str, list[int]]:
    options = {"max_tokens": 50, "ignore_eos": True, **sampling}
    wanted = [request(f"r {name}", PROMPT, plan, **{**options, **rule}) for name, rule in RULES.items()]
    found = await asyncio.gather(*(collect(running.loop, one) for one in wanted))
    return {name: tokens for name, (tokens, _, _) in zip(RULES, found, strict=True)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("link", ["in_process", "grpc"])
async def test_every_source_gives_the_tokens_of_plain_decoding(tiny_model: Path, link: str) -> None:
    async with verifier(tiny_model, "real", link, "fixed") as running:
        for sampling in SAMPLING:
            plain = await answers(running, PLAIN, sampling)
            for name, tokens in plain.items():
                allowed, words = RULES[name].get("allowed_token_ids"), RULES[name].get("bad_words", ())
                assert allowed is None or set(tokens) <= set(allowed)
                text = f" {' '.join(map(str, tokens))} "
                assert not any(f" {' '.join(map(str, word))} " in text for word in words)
            free = await collect(running.loop, request("free", PROMPT, PLAIN, max_tokens=50, ignore_eos=True, **sampling))
            assert free[0] not in plain.values(), "the rules must matter for this test to mean anything"
            for sources in (BLEND, ("draft_model",), ("eagle3",), ("suffix",)) if link == "in_process" else (BLEND,):
                assert await answers(running, plan_of(sources), sampling) == plain, (sources, sampling)
        greedy = await answers(running, plan_of(BLEND, acceptance="rejection"), {})
        assert greedy == await answers(running, PLAIN, {})


async def test_it_goes_on_after_what_another_verifier_has_committed(tiny_model: Path) -> None:
    async with verifier(tiny_model, "real", "in_process", "fixed") as running:
        asked = request("r", PROMPT, PLAIN, max_tokens=40, ignore_eos=True, **RULES["both"])
        tokens, _, _ = await collect(running.loop, asked)
        for cut in range(1, 40, 5):
            moved = replace(asked, request_id="moved", committed=tuple(tokens[:cut]), plan=plan_of(BLEND))
            rest, _, _ = await collect(running.loop, moved)
            assert [*tokens[:cut], *rest] == tokens, cut


async def test_within_a_grammar(tiny_model: Path) -> None:
    """The first letter that the expression would take is a bad word; the answer is of the form all the same."""
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    async with verifier(tiny_model, "real", "in_process", "fixed") as running:
        form = {"structured_outputs": StructuredOutputs(kind="regex", text="[a-f]{12}"), "max_tokens": 40}
        free, _, _ = await collect(running.loop, request("free", PROMPT, PLAIN, **form))
        held = {**form, "bad_words": ((free[0],), tuple(free[1:3]))}
        plain, _, _ = await collect(running.loop, request("plain", PROMPT, PLAIN, **held))
        assert free[0] not in plain
        assert len(tokenizer.decode(plain)) == 12
        assert set(tokenizer.decode(plain)) <= set("abcdef")
        for sources in (BLEND, ("draft_model",), ("suffix",)):
            assert (await collect(running.loop, request("r", PROMPT, plan_of(sources), **held)))[0] == plain
