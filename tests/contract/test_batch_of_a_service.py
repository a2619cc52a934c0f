"""``outrider run-batch`` by a real service: each answer is what the request gets by itself, at every door."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
from typer.testing import CliRunner

from cli.main import app
from tests.servers.http_service import http_served

ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "fox"}]}),
    "completion": ("/v1/completions", {"prompt": "the quick", "speculation": {"strategy": "blend"}}),
    "response": ("/v1/responses", {"input": "fox", "store": False}),
    "message": ("/v1/messages", {"messages": [{"role": "user", "content": "fox"}]}),
    "refused": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "fox"}], "mirostat": 2}),
}
LENGTH = {"/v1/responses": "max_output_tokens"}


def body_of(name: str) -> dict[str, Any]:
    path, body = ASKED[name]
    more = {"seed": 5} if path != "/v1/messages" else {}
    return {**body, LENGTH.get(path, "max_tokens"): 8, "temperature": 0.0, **more}


def text_of(body: dict[str, Any]) -> Any:
    for part in ("choices", "content", "output"):
        if part in body:
            return [{name: value for name, value in each.items() if name not in ("id", "logprobs")} for each in body[part]]
    return body["error"]


def test_a_line_is_answered_as_its_request_is(tiny_model: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    lines = [{"custom_id": name, "method": "POST", "url": ASKED[name][0], "body": body_of(name)} for name in ASKED]
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    with http_served(tiny_model) as service:
        done = CliRunner().invoke(app, ["run-batch", "-i", str(file), "-o", str(out), "--url", service.url])
        plain = {name: httpx2.post(service.url + ASKED[name][0], json=body_of(name), timeout=60) for name in ASKED}
    assert done.exit_code == 1 and "4 answered, 1 refused" in done.output, done.output
    found = {each["custom_id"]: each["response"] for each in map(json.loads, out.read_text().splitlines())}
    assert found.keys() == set(ASKED)
    for name, response in found.items():
        assert response["status_code"] == plain[name].status_code
        assert text_of(response["body"]) == text_of(plain[name].json()), name


def test_a_model_in_its_own_process(tiny_model: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    lines = [
        {"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": body_of("completion")} for n in range(3)
    ]
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    shared = ["--model", str(tiny_model), "--set", f"cache_dir={tmp_path}", "--set", "server.served_model_name=[own]"]
    done = CliRunner().invoke(app, ["run-batch", "-i", str(file), "-o", str(out), "--in-process", *shared])
    assert done.exit_code == 0, done.output
    bodies = [each["response"]["body"] for each in map(json.loads, out.read_text().splitlines())]
    # What settings say of answers holds.
    assert {body["model"] for body in bodies} == {"own"}
    assert len({body["choices"][0]["text"] for body in bodies}) == 1
