"""Answers of a given form through the SDK, against the whole service on a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import outrider
from outrider import AsyncClient
from tests.servers.answer_forms import CHOICE, FORMS, REGEX, SCHEMA
from tests.servers.service import served

BAD: list[tuple[str, object]] = [
    ("structured_outputs", {}),
    ("structured_outputs", "json"),
    ("structured_outputs", {"json": SCHEMA, "regex": "a"}),
    ("structured_outputs", {"yaml": "a: 1"}),
    ("structured_outputs.json", {"json": {"type": {1, 2}}}),
    ("structured_outputs.json", {"json": {"const": float("nan")}}),
    ("structured_outputs.json", {"json": {"type": "hiccup"}}),
    ("structured_outputs.json", {"json": {"not": {}}}),
    ("structured_outputs.json", {"json": "{"}),
    ("structured_outputs.json", {"json": {"const": "x" * 70_000}}),
    ("structured_outputs.json", {"json": {"type": "integer", "minimum": 10**400}}),
    ("structured_outputs.json", {"json": '{"minimum":1e999}'}),
    ("structured_outputs.regex", {"regex": "\\"}),
    ("structured_outputs.json_object", {"json_object": False}),
    ("structured_outputs.regex", {"regex": "(a"}),
    ("structured_outputs.regex", {"regex": 7}),
    ("structured_outputs.regex", {"regex": r"[^\s\S]"}),
    ("structured_outputs.choice", {"choice": []}),
    ("structured_outputs.choice", {"choice": [""]}),
    ("structured_outputs.choice", {"choice": [1]}),
    ("structured_outputs.grammar", {"grammar": "start: nowhere"}),
    ("structured_outputs.grammar", {"grammar": "start: <|nowhere|>"}),
]


async def test_an_answer_has_the_form_that_is_asked_for(tiny_model: Path) -> None:
    async with served(tiny_model) as (address, _), AsyncClient(address) as client:
        for asked, has in (
            ({"json": SCHEMA}, FORMS["json"].has),
            ({"json": json.dumps(SCHEMA)}, FORMS["json"].has),
            ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text)),
            ({"choice": CHOICE}, lambda text: text in CHOICE),
            ({"grammar": FORMS["grammar"].structured.text}, FORMS["grammar"].has),
        ):
            for sampling in ({}, {"temperature": 1.0, "seed": 5, "top_p": 0.9}):
                found = [
                    await client.generate("fox", max_tokens=150, structured_outputs=asked, strategy=strategy, **sampling)
                    for strategy in ("autoregressive", "blend")
                ]
                assert [answer.finish_reason for answer in found] == ["stop", "stop"]
                assert has(found[0].text), found[0].text
                assert found[0].token_ids == found[1].token_ids
                assert found[0].speculative_decoding.num_draft_tokens == 0
        cut = await client.generate("fox", max_tokens=3, structured_outputs={"json_object": True})
        assert cut.text.startswith("{")


async def test_what_cannot_be_honoured_is_refused_by_name(tiny_model: Path) -> None:
    async with served(tiny_model) as (address, running), AsyncClient(address) as client:
        for field, value in BAD:
            with pytest.raises(outrider.InvalidArgument) as caught:
                await client.generate("fox", structured_outputs=value)  # type: ignore[arg-type]
            assert caught.value.field == field, value
            assert str(caught.value).isprintable()
        for field, option in (("min_tokens", {"min_tokens": 2}), ("ignore_eos", {"ignore_eos": True})):
            with pytest.raises(outrider.InvalidArgument) as caught:
                await client.generate("fox", structured_outputs={"regex": "a"}, **option)  # type: ignore[arg-type]
            assert caught.value.field == field
        assert running.verifier.loop.running == 0
