"""A list of sources in place of a strategy, at every door: the same tokens, drafted by exactly these."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

import outrider
from cli.main import app
from tests.servers.http_service import HttpService

TEXT = "one two three one two three one two three one two"
LISTED = ["lookahead", "prompt_lookup"]


def completion(service: HttpService, **speculation: Any) -> dict[str, Any]:
    body = {"prompt": TEXT, "max_tokens": 32, "ignore_eos": True, "temperature": 0, "speculation": speculation}
    answer = httpx2.post(f"{service.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_the_same_tokens_by_exactly_these(both_entries: HttpService) -> None:
    plain = completion(both_entries, strategy="autoregressive")
    listed = completion(both_entries, sources=LISTED)
    assert listed["choices"][0]["text"] == plain["choices"][0]["text"]
    how = listed["metrics"]["speculative_decoding"]
    assert how["strategy"] == "blend" and how["num_draft_tokens"] > 0
    assert set(how["accepted_by_source"]) <= set(LISTED)
    options = {"max_tokens": 32, "ignore_eos": True, "temperature": 0.0}
    with outrider.Client(both_entries.grpc) as client:
        found = client.generate(TEXT, sources=LISTED, **options)  # type: ignore[arg-type]
        assert found.text == plain["choices"][0]["text"]
        assert found.speculative_decoding.strategy == "blend"
        assert client.generate(TEXT, sources="anpd", **options).token_ids == found.token_ids  # type: ignore[arg-type]
        with pytest.raises(outrider.errors.InvalidArgument) as refused:
            client.generate(TEXT, sources=["anpd"], strategy="suffix")
        assert (refused.value.field, refused.value.value) == ("speculation.sources", "anpd")


def test_on_the_command_line(both_entries: HttpService) -> None:
    command = ["generate", TEXT, "--address", both_entries.grpc, "--max-tokens", "8", "--json"]
    said = CliRunner().invoke(app, [*command, "--draft-sources", ",".join(LISTED)])
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["metrics"]["speculative_decoding"]["strategy"] == "blend"
    wrong = CliRunner().invoke(app, [*command, "--draft-sources", "anpd,rest"])
    assert wrong.exit_code != 0 and "no retrieval index" in str(wrong.exception)
