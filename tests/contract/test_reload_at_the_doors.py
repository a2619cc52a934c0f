"""Replacing weights by HTTP, gRPC, the SDK and the command line: who may, what is refused, and what answers name."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner
from typing_extensions import override

import outrider
from cli.main import app
from services.access.key_records import hash_key
from services.api.config import HttpConfig, PublicServerConfig
from services.api.http.server import serve_http
from services.api.messages import ClientRequest, Completion, TextChunk
from tests.servers.http_service import HttpService, http_served
from tests.servers.openai_types import events_of
from tests.servers.scripted_router import ScriptedRouter
from tests.tiny_models.new_weights import other_weights

KEYS = {"admin": "a" * 20, "user": "u" * 20}
PATH = "/update_weights_from_disk"
ASKED: dict[str, Any] = {"prompt": "the quick brown fox", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("versions")
    shutil.copytree(tiny_model, made / "a")
    other_weights(tiny_model, made / "b")
    return made


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[HttpService]:
    keys = folder / "keys.yaml"
    records = [f"{{hash: {hash_key(KEYS['admin'])}, id: admin, tenant: t, scopes: [generate, admin]}}"]
    records.append(f"{{hash: {hash_key(KEYS['user'])}, id: user, tenant: t}}")
    keys.write_text("".join(f"- {record}\n" for record in records))
    config = HttpConfig(port=0, public=PublicServerConfig(keys_file=keys))
    with http_served(folder / "a", f"verifier.weights_from=['{folder}']", config=config) as running:
        yield running


def post(service: HttpService, path: str, key: str = "admin", **body: Any) -> httpx2.Response:
    return httpx2.post(service.url + path, json=body, headers={"authorization": f"Bearer {KEYS[key]}"}, timeout=60)


def said(service: HttpService) -> tuple[str, str]:
    """An answer's text, and what it names itself, the same whole and streamed."""
    whole = post(service, "/v1/completions", **ASKED).json()
    events = events_of(post(service, "/v1/completions", **ASKED, stream=True).text)
    assert {event["system_fingerprint"] for event in events} == {whole["system_fingerprint"]}
    return whole["choices"][0]["text"], whole["system_fingerprint"]


def test_answers_name_the_version_that_wrote_them(service: HttpService, folder: Path) -> None:
    before = said(service)
    done = post(service, PATH, model_path=str(folder / "b"), running="restart", flush_cache=True, abort_all_requests=False)
    assert done.status_code == 200, done.text
    after = said(service)
    assert done.json()["success"] and done.json()["system_fingerprint"] == after[1] != before[1]
    assert after[0] != before[0]
    # And back, by the command line, whose answer is what gRPC's answers name.
    with outrider.Client(service.grpc) as client:
        command = ["reload", str(folder / "a"), "--address", service.grpc, "--json"]
        ran = CliRunner().invoke(app, command)
        assert ran.exit_code == 0, ran.output
        assert client.generate("fox", max_tokens=2).arithmetic == json.loads(ran.stdout)["arithmetic"]
        assert said(service) == before
        assert client.reload(str(folder / "a"), running="restart", within_s=5).arithmetic
    ran = CliRunner().invoke(app, ["reload", str(folder / "a"), "--address", service.grpc, "--within", "5"])
    assert f"serves the weights in {folder / 'a'}" in ran.output


def test_a_key_needs_the_scope(service: HttpService, folder: Path) -> None:
    answer = post(service, PATH, key="user", model_path=str(folder / "b"))
    assert answer.status_code == 403 and "may not admin" in answer.text
    with pytest.raises(outrider.InvalidArgument):
        # The gRPC server here asks for no key, and refuses the folder.
        outrider.Client(service.grpc).reload("/etc")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "model_path"),
        ({"model_path": ""}, "model_path"),
        ({"model_path": "/etc"}, "model_path"),
        ({"model_path": "/etc", "running": "abort"}, "running"),
        ({"model_path": "/etc", "within_s": 0}, "within_s"),
        ({"model_path": "/etc", "abort_all_requests": True}, "abort_all_requests"),
        ({"model_path": "/etc", "flush_cache": False}, "flush_cache"),
        ({"model_path": "/etc", "load_format": "gguf"}, "load_format"),
        ({"model_path": "/etc", "weight_version": "7"}, "weight_version"),
    ],
)
def test_bad_bodies_are_refused_by_name(service: HttpService, fields: dict[str, Any], param: str) -> None:
    answer = post(service, PATH, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_bad_calls_of_the_sdk_are_refused_by_name(service: HttpService) -> None:
    with outrider.Client(service.grpc) as client:
        for given, field in (({"running": "abort"}, "running"), ({"within_s": 0.0}, "within_s"), ({}, "folder")):
            with pytest.raises(outrider.InvalidArgument) as caught:
                client.reload("" if field == "folder" else "/x", **given)  # type: ignore[arg-type]
            assert caught.value.field == field


def test_weights_of_another_shape_are_refused_as_such(service: HttpService, folder: Path) -> None:
    shutil.copytree(folder / "a", folder / "c")
    config = json.loads((folder / "c" / "config.json").read_text())
    (folder / "c" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}))
    before = said(service)
    with outrider.Client(service.grpc) as client, pytest.raises(outrider.FailedPrecondition, match="layer 2"):
        client.reload(str(folder / "c"))
    assert post(service, PATH, model_path=str(folder / "c")).status_code == 400
    assert said(service) == before


class Restarting(ScriptedRouter):
    """Says something, then begins once more with another version's words."""

    @override
    async def generate(self, request: ClientRequest) -> AsyncGenerator[TextChunk | Completion, None]:
        assert request.whole
        async for event in super().generate(request):
            if isinstance(event, Completion):
                break
            yield event
        self.text, first = "new words", True
        async for event in super().generate(request):
            if isinstance(event, TextChunk) and first:
                event = TextChunk(
                    text=event.text, token_ids=event.token_ids, text_ends=event.text_ends, arithmetic="new", restarted=True
                )
                first = False
            yield event


async def test_an_answer_that_begins_once_more_is_told_without_its_first_beginning() -> None:
    server = await serve_http(Restarting("old words, and more of them"), HttpConfig(port=0))
    try:
        async with httpx2.AsyncClient() as client:
            url, body = f"{server.url}/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}
            answer = (await client.post(url, json=body)).json()
            assert answer["choices"][0]["message"]["content"] == "new words"
    finally:
        await server.stop(0)
