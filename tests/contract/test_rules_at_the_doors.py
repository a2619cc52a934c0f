"""The router's rules behind every door: which one counts, what the answer says of it, and the same tokens whatever it sets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

import outrider
from cli.main import app
from services.access.key_records import hash_key
from services.api.config import HttpConfig, PublicServerConfig
from services.api.told_headers import told_headers
from tests.servers.http_service import HttpService, http_served

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "the lazy fox"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
RULES: list[dict[str, Any]] = [
    {"name": "by-header", "when": {"header": {"X-Job": "nightly"}}, "set": {"strategy": "suffix"}},
    {"name": "by-metadata", "when": {"metadata": {"task": "edit"}}, "set": {"strategy": "prompt_lookup"}},
    {"name": "by-system", "when": {"system_prompt": "(?i)POET"}, "set": {"strategy": "lookahead", "effort": "measured"}},
    {"name": "by-tools", "when": {"tools": True}, "set": {"strategy": "anpd"}},
    {"name": "by-grammar", "when": {"grammar": True}, "set": {"strategy": "recycling"}},
    {"name": "by-prediction", "when": {"prediction": True}, "set": {"strategy": "suffix"}},
    {"name": "by-length", "when": {"prompt_tokens": {"min": 40}}, "set": {"strategy": "spectra_core", "num_speculative_tokens": 9}},
    {"name": "by-key", "when": {"key": "batch", "sampled": True}, "set": {"strategy": "autoregressive"}},
]  # fmt: skip
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 5}
KEY = "a key of some length"


@pytest.fixture(scope="module")
def ruled(tiny_model: Path) -> Iterator[HttpService]:
    with http_served(tiny_model, f"router.rules={json.dumps(RULES)}") as service:
        yield service


def chat(
    service: HttpService, path: str = CHAT, headers: dict[str, str] | None = None, **body: Any
) -> tuple[str, dict[str, Any]]:
    """The answer's text, and how it was drafted."""
    given = {"max_tokens": 24, "ignore_eos": True, "temperature": 0} | body
    answer = httpx2.post(service.url + path, json=given, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    (choice,) = said["choices"]
    return choice.get("text") or choice["message"]["content"], said["metrics"]["speculative_decoding"]


@pytest.mark.parametrize(
    ("rule", "headers", "body"),
    [
        ("by-header", {"x-job": "nightly"}, {"messages": [USER]}),
        ("by-metadata", {}, {"messages": [USER], "metadata": {"task": "edit"}}),
        ("by-system", {}, {"messages": [{"role": "system", "content": "You are a poet."}, USER]}),
        ("by-system", {}, {"messages": [{"role": "developer", "content": "You are a poet."}, USER], **SAMPLED}),
        ("by-grammar", {}, {"messages": [USER], "structured_outputs": {"regex": "[a-z]{8}"}, "ignore_eos": False}),
        ("by-length", {}, {"messages": [{"role": "user", "content": "fox " * 60}], **SAMPLED}),
        (None, {}, {"messages": [USER]}),
    ],
)  # fmt: skip
def test_a_rule_counts_and_changes_no_token(
    ruled: HttpService, rule: str | None, headers: dict[str, str], body: dict[str, Any]
) -> None:
    text, how = chat(ruled, headers=headers, **body)
    assert how.get("rule") == rule
    wanted: dict[str, Any] = next((each["set"] for each in RULES if each["name"] == rule), {"strategy": "auto"})
    assert how["strategy"] == wanted["strategy"]
    plain, named = chat(ruled, headers=headers, speculation={"strategy": "autoregressive"}, **body)
    assert (text, named["strategy"]) == (plain, "autoregressive")
    assert "rule" not in named


def test_tools_and_predictions_are_seen_and_a_rule_that_does_not_suit_is_passed_over(ruled: HttpService) -> None:
    assert chat(ruled, messages=[USER], tools=[TOOL])[1]["rule"] == "by-tools"
    # suffix would refuse the prediction.
    _, how = chat(ruled, messages=[USER], prediction={"type": "content", "content": "the lazy"})
    assert "rule" not in how and how["strategy"] == "auto"


def test_texts_and_the_other_doors(ruled: HttpService) -> None:
    assert chat(ruled, COMPLETIONS, prompt="fox", metadata={"task": "edit"})[1]["rule"] == "by-metadata"
    assert chat(ruled, COMPLETIONS, prompt="fox " * 60)[1]["rule"] == "by-length"
    with outrider.Client(ruled.grpc) as client:
        poet = [outrider.Message(role="system", content="A poet."), outrider.Message(role="user", content=USER["content"])]
        found = client.generate(messages=poet, max_tokens=8).speculative_decoding
        assert (found.rule, found.strategy) == ("by-system", "lookahead")
        assert client.generate("fox", max_tokens=8).speculative_decoding.rule == ""

    # These do not tell how they were drafted; the metric does.
    def counted() -> float:
        sink = ruled.pipeline.observing.exposition().decode()
        line = next(
            (each for each in sink.splitlines() if each.startswith('outrider_router_rules_matched_total{rule="by-system"}')),
            " 0",
        )
        return float(line.rpartition(" ")[2])

    before = counted()
    for path, body in (
        (MESSAGES, {"system": "A poet.", "messages": [USER], "max_tokens": 4}),
        (RESPONSES, {"instructions": "A poet.", "input": "fox", "max_output_tokens": 4, "store": False}),
    ):
        assert httpx2.post(ruled.url + path, json=body, timeout=60).status_code == 200
    assert counted() == before + 2


def test_a_key_is_known_by_its_name(tiny_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"- {{hash: {hash_key(KEY)}, id: batch, tenant: acme}}\n")
    config = HttpConfig(port=0, public=PublicServerConfig(keys_file=keys))
    with http_served(tiny_model, f"router.rules={json.dumps(RULES)}", config=config) as service:
        headers = {"authorization": f"Bearer {KEY}"}
        assert chat(service, headers=headers, messages=[USER], **SAMPLED)[1]["rule"] == "by-key"
        assert "rule" not in chat(service, headers=headers, messages=[USER])[1]


def test_secrets_are_not_among_the_headers() -> None:
    given: list[tuple[str, str | bytes]] = [
        ("Authorization", "Bearer x"),
        ("X-Job", "a"),
        ("x-job", "b"),
        ("cookie", "c"),
        ("trace-bin", b"\x00"),
    ]
    assert told_headers(given) == {"x-job": "a, b"}


@pytest.mark.parametrize("as_json", [True, False])
def test_a_request_is_explained_before_it_is_sent(tiny_model: Path, tmp_path: Path, as_json: bool) -> None:
    body, settings = tmp_path / "request.json", tmp_path / "outrider.yaml"
    body.write_text(json.dumps({"messages": [USER], "temperature": 0, "speculation": {"num_speculative_tokens": 4}}))
    settings.write_text(json.dumps({"model": str(tiny_model), "router": {"rules": RULES}}))
    command = ["plan", "--config", str(settings), "--explain", str(body)]

    def explained(*call: str) -> str:
        flags = [flag for each in call for flag in ("--call", each)]
        said = CliRunner().invoke(app, [*command, *flags, *(["--json"] if as_json else [])])
        assert said.exit_code == 0, said.output
        return said.stdout

    said = explained("header.X-Job=nightly", "tenant=acme", "open_requests=3", "time=2026-11-25T23:30")
    if not as_json:
        assert "by-header" in said and "the rule by-header" in said and "the request" in said
        assert "No rule counts" in explained()
        return
    told = json.loads(said)
    assert (told["rule"], told["plan"]["strategy"], told["plan"]["num_speculative_tokens"]) == ("by-header", "suffix", 4)
    assert told["said_by"] == {
        "strategy": "the rule by-header",
        "sources": "the strategy",
        "num_speculative_tokens": "the request",
        "effort": "the strategy",
        "drafter": "the strategy",
    }
    other = json.loads(explained("key=batch"))
    assert (other["rule"], other["said_by"]["strategy"]) == (None, "router.strategy")
    assert [each["passed_over"] for each in other["rules"]][-2:] == [
        'prompt_tokens is 10, not {"min": 40}',
        "sampled is false, not true",
    ]


@pytest.mark.parametrize("call", ["tenant", "header.=x", "open_requests=many", "time=noon", "colour=red"])
def test_a_wrong_call_is_refused(tiny_model: Path, tmp_path: Path, call: str) -> None:
    body = tmp_path / "request.json"
    body.write_text(json.dumps({"prompt": "fox"}))
    said = CliRunner().invoke(app, ["plan", "--model", str(tiny_model), "--explain", str(body), "--call", call])
    assert said.exit_code != 0 and "--call" in f"{said.output}{said.exception}"
    alone = CliRunner().invoke(app, ["plan", "--call", "tenant=acme"])
    assert alone.exit_code != 0 and "--explain" in f"{alone.output}{alone.exception}"
