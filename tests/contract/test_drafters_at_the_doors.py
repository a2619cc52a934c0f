"""Requests that name the model which drafts, behind every door: the same tokens, its own drafts, and whose it is to name."""

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
from services.api.grpc.server import serve_public
from tests.servers.http_service import HttpService, http_served
from tests.tiny_models.trained_heads import make_head, make_medusa

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "the lazy fox"}
ACME, FIRM, CLERK = "acme's key of some length", "firm's key of some length", "the firm's clerk's key of some length"
NAMES = ("twin", "copy", "law", "night")


@pytest.fixture(scope="module")
def settings(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A model that drafts what the target says, and heads of one kind."""
    folder = tmp_path_factory.mktemp("named")
    heads = [make_head(tiny_model, folder / name, "fspad") for name in NAMES[1:]]
    guesses = make_medusa(tiny_model, folder / "guesses")
    return [
        {"folder": str(tiny_model), "name": "twin"},
        {"folder": str(heads[0]), "name": "copy"},
        {"folder": str(heads[1]), "name": "law", "tenants": ["firm"]},
        {"folder": str(heads[2]), "name": "night", "when": {"header": {"x-job": "nightly"}}},
        {"folder": str(guesses), "tenants": ["firm"]},
    ]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tenants' keys, and one of the second that may name two strategies."""
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    records = [
        f"- {{hash: {hash_key(key)}, id: {name}, tenant: {name}}}\n" for key, name in ((ACME, "acme"), (FIRM, "firm"))
    ]
    few = f"- {{hash: {hash_key(CLERK)}, id: clerk, tenant: firm, strategies: [medusa, suffix]}}\n"
    file.write_text("".join((*records, few)))
    return file


@pytest.fixture(scope="module")
def service(tiny_model: Path, settings: list[dict[str, Any]], keys: Path) -> Iterator[HttpService]:
    config = HttpConfig(port=0, public=PublicServerConfig(keys_file=keys))
    rules = [
        {"name": "batch", "when": {"header": {"x-job": "batch"}}, "set": {"drafter": "twin", "strategy": "draft_model"}}
    ]
    flags = (f"drafter.models={json.dumps(settings)}", f"router.rules={json.dumps(rules)}", "verifier.draft_deadline_s=10")
    with http_served(tiny_model, *flags, config=config) as running:
        yield running


def ask(
    service: HttpService, path: str, key: str = ACME, headers: dict[str, str] | None = None, **body: Any
) -> httpx2.Response:
    given = {"authorization": f"Bearer {key}", **(headers or {})}
    return httpx2.post(service.url + path, json=body, headers=given, timeout=60)


def chat(
    service: HttpService, key: str = ACME, headers: dict[str, str] | None = None, **speculation: Any
) -> tuple[str, dict[str, Any]]:
    """The answer's text, and how it was drafted."""
    answer = ask(
        service, CHAT, key, headers, messages=[USER], max_tokens=24, ignore_eos=True, temperature=0, speculation=speculation
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"], answer.json()["metrics"]["speculative_decoding"]


def test_the_named_one_drafts_and_changes_no_token(service: HttpService) -> None:
    plain, _ = chat(service, strategy="autoregressive")
    text, how = chat(service, strategy="draft_model", drafter="twin")
    assert text == plain and set(how["accepted_by_source"]) == {"draft_model@twin"}
    for name, key in (("copy", ACME), ("law", FIRM), ("night", ACME)):
        text, how = chat(service, key, strategy="fspad", drafter=name)
        assert text == plain and set(how["accepted_by_source"]) <= {f"fspad@{name}"}
    asked: list[dict[str, Any]] = [{}, {"drafter": "twin"}, {"drafter": "night", "effort": "paper"}]
    for named in asked:
        text, how = chat(service, **named)
        assert (text, how["strategy"]) == (plain, "auto")


def test_a_rule_names_one(service: HttpService) -> None:
    text, how = chat(service, headers={"x-job": "batch"})
    assert how["rule"] == "batch" and set(how["accepted_by_source"]) == {"draft_model@twin"}
    assert text == chat(service, strategy="autoregressive")[0]


@pytest.mark.examples(8)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [USER]}),
        (COMPLETIONS, {"prompt": "fox"}),
        (MESSAGES, {"messages": [USER], "max_tokens": 4}),
        (RESPONSES, {"input": "fox", "max_output_tokens": 4, "store": False}),
    ],
    ids=["chat", "completions", "messages", "responses"],
)
@pytest.mark.parametrize("name", ["law", "lore"])
def test_a_model_that_is_not_theirs_is_refused_like_one_that_is_not_there(
    service: HttpService, path: str, body: dict[str, Any], name: str
) -> None:
    refused = ask(service, path, speculation={"drafter": name}, **body)
    assert refused.status_code == 400, refused.text
    said = refused.json()["error"]["message"]
    assert "speculation.drafter" in said and f"is {name}" in said and "one of twin, copy, night" in said
    assert ask(service, path, FIRM, speculation={"drafter": "law"}, **body).status_code == 200


# What each key may name: strategies of models that others have are not among them.
SHARED = [("twin", "draft_model"), ("copy", "fspad"), ("night", "fspad")]
FIRMS = [SHARED[0], SHARED[1], ("law", "fspad"), SHARED[2], ("medusa", "medusa")]


@pytest.mark.parametrize(
    ("key", "drafters", "strategies"),
    [
        (ACME, SHARED, {"fspad": True, "draft_model": True, "suffix": True, "medusa": False}),
        (FIRM, FIRMS, {"fspad": True, "draft_model": True, "suffix": True, "medusa": True}),
        (CLERK, FIRMS, {"fspad": False, "draft_model": False, "suffix": True, "medusa": True}),
    ],
    ids=["acme", "firm", "clerk"],
)
def test_the_lists_of_both_doors_show_what_a_key_may_name(
    service: HttpService, keys: Path, key: str, drafters: list[tuple[str, str]], strategies: dict[str, bool]
) -> None:
    given = {"authorization": f"Bearer {key}"}
    (model,) = httpx2.get(f"{service.url}/v1/models", headers=given, timeout=60).json()["data"]
    alone = httpx2.get(f"{service.url}/v1/models/{model['id']}", headers=given, timeout=60).json()
    assert alone == model and model["default_strategy"] == "auto"
    assert [(each["name"], each["strategy"]) for each in model["drafters"]] == drafters
    assert {name: name in model["strategies"] for name in strategies} == strategies
    server = service.run(serve_public(service.pipeline.router, PublicServerConfig(port=0, keys_file=keys)))
    try:
        with outrider.Client(server.address, api_key=key) as client:
            (listed,) = client.models()
            assert [(each.name, each.strategy) for each in listed.drafters] == drafters
            assert list(listed.strategies) == model["strategies"]
            _check_names(client, [name for name, _ in drafters])
        shown = CliRunner().invoke(app, ["models", "--address", server.address, "--api-key", key]).stdout
        assert ("law (fspad)" in " ".join(shown.split())) == (("law", "fspad") in drafters)
    finally:
        service.run(server.stop(0))


def _check_names(client: outrider.Client, names: list[str]) -> None:
    """What is listed is taken, and nothing else: another tenant's is refused like one that is not there."""
    for name in names:
        assert client.generate("fox", max_tokens=2, drafter=name).token_ids
    refused = []
    for name in {"law", "medusa", "lore"} - set(names):
        with pytest.raises(outrider.errors.InvalidArgument) as error:
            client.generate("fox", max_tokens=2, drafter=name)
        assert (error.value.field, error.value.value) == ("speculation.drafter", name)
        refused.append(error.value.allowed)
    assert set(refused) == {f"one of {', '.join(names)}"}


def test_nothing_that_a_tenant_sees_names_anothers(service: HttpService) -> None:
    _, how = chat(service, effort="paper")
    told = [json.dumps(how), ask(service, CHAT, messages=[USER], speculation={"strategy": "medusa"}).text]
    told += [
        httpx2.get(service.url + path, headers={"authorization": f"Bearer {ACME}"}, timeout=60).text
        for path in ("/v1/models", "/v1/outrider/status", "/openapi.json")
    ]
    assert not any('law"' in each or "@law" in each or " law" in each for each in told)
    assert '"medusa"' not in told[2]


def test_wrong_types_and_the_other_entry(service: HttpService) -> None:
    assert ask(service, CHAT, messages=[USER], speculation={"drafter": 7}).status_code == 400
    assert ask(service, CHAT, messages=[USER], speculation={"drafter": "twin", "strategy": "suffix"}).status_code == 400
    with outrider.Client(service.grpc) as client:
        plain = client.generate("the lazy fox", max_tokens=16, strategy="autoregressive")
        found = client.generate("the lazy fox", max_tokens=16, strategy="draft_model", drafter="twin")
        assert found.token_ids == plain.token_ids
        assert set(found.speculative_decoding.accepted_by_source) == {"draft_model@twin"}
        with pytest.raises(outrider.errors.InvalidArgument) as refused:
            client.generate("fox", drafter="law")
        assert (refused.value.field, refused.value.value) == ("speculation.drafter", "law")
        assert refused.value.allowed == "one of twin, copy, night"
    wrong = ["generate", "fox", "--address", service.grpc, "--drafter", "law"]
    said = CliRunner().invoke(app, wrong)
    assert said.exit_code != 0 and "one of twin, copy, night" in str(said.exception)


def test_a_request_is_explained(tiny_model: Path, settings: list[dict[str, Any]], tmp_path: Path) -> None:
    body, file = tmp_path / "request.json", tmp_path / "outrider.yaml"
    body.write_text(json.dumps({"messages": [USER], "speculation": {"drafter": "law"}}))
    file.write_text(json.dumps({"model": str(tiny_model), "drafter": {"models": settings}}))
    command = ["plan", "--config", str(file), "--explain", str(body), "--json"]
    explained = json.loads(CliRunner().invoke(app, [*command, "--call", "tenant=firm"]).stdout)
    assert explained["plan"]["drafter"] == "law" and "fspad@law" in explained["plan"]["sources"]
    assert explained["said_by"]["drafter"] == "the request"
    assert "one of twin, copy, night" in str(CliRunner().invoke(app, command).exception)
