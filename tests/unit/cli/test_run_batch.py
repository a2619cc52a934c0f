"""``outrider run-batch``: its two files, and a service that is busy, goes away, or says nonsense."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from typing_extensions import override

from cli.batch_files import AnswersFile, read_requests
from cli.batch_run import BatchRun
from cli.main import app
from speculation.errors import ConfigurationError, Unavailable
from tests.running.ports import free_port

RUN = CliRunner()


def line(name: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def written(folder: Path, *lines: Any) -> Path:
    file = folder / "requests.jsonl"
    file.write_text("\n\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines))
    return file


class _Server(ThreadingHTTPServer):
    """Answers each prompt with what ``said`` has for it, one after the other; the last one stays."""

    def __init__(self, said: dict[str, list[tuple[int, str, dict[str, str]]]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.said = said
        self.asked: Counter[str] = Counter()
        self.keys: set[str | None] = set()
        self.together = self.most = 0
        self.lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    @override
    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self._send(404, "{}", {})

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["content-length"])))["prompt"]
        server = self.server
        with server.lock:
            server.together += 1
            server.most = max(server.most, server.together)
            server.keys.add(self.headers["authorization"])
            turn = server.asked[prompt]
            server.asked[prompt] += 1
        time.sleep(0.02)
        with server.lock:
            server.together -= 1
        said = server.said.get(prompt, [(200, '{"ok": true}', {})])
        self._send(*said[min(turn, len(said) - 1)])

    def _send(self, status: int, content: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(content)), "x-request-id": "r1", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content.encode())


@contextmanager
def answering(**said: list[tuple[int, str, dict[str, str]]]) -> Iterator[tuple[_Server, str]]:
    with _Server(said) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("[]", "line 3: body is a list"),
        ('{"custom_id": "b", "custom_id": "c"}', "line 3: custom_id"),
        (line("a", prompt="x"), "line 3: custom_id is a: must be another one than before"),
        (line("", prompt="x"), "line 3: custom_id is ''"),
        ({**line("b"), "custom_id": 7}, "line 3: custom_id is 7"),
        ({**line("b"), "method": "GET"}, "line 3: method is GET"),
        ({**line("b"), "url": "/v1/embeddings"}, "line 3: url is /v1/embeddings"),
        ({**line("b"), "body": []}, "line 3: body is []"),
        ({**line("b"), "params": {}}, "line 3: params is {}: must be unset"),
        (line("b", stream=True), "line 3: body.stream is true"),
        (line("b", background=True), "line 3: body.background is true"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, wrong: Any, says: str) -> None:
    file = written(tmp_path, line("a", prompt="x"), wrong)
    with pytest.raises(ConfigurationError) as refused:
        read_requests(file)
    assert f"{file}, {says}" in str(refused.value)


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no requests are there"):
        read_requests(written(tmp_path, ""))


def test_each_line_has_an_answer_and_some_are_asked_at_once(tmp_path: Path) -> None:
    said = {
        "busy": [(429, "{}", {"retry-after": "0.1"}), (503, "{}", {}), (200, '{"ok": 1}', {})],
        "wrong": [(400, '{"error": "no"}', {})],
        "page": [(200, "<html>", {})],
        "moved": [(307, "{}", {"location": "http://127.0.0.1:1/"})],
        "effort": [(200, "{}", {"x-outrider-ignored": "reasoning_effort, samplers"})],
    }
    names = [*said, *(f"plain{number}" for number in range(20))]
    file, out = written(tmp_path, *(line(name, prompt=name) for name in names)), tmp_path / "answers.jsonl"
    with answering(**said) as (server, url):
        command = [
            "run-batch",
            "-i",
            str(file),
            "-o",
            str(out),
            "--url",
            f"{url}/v1",
            "--at-once",
            "4",
            "--api-key",
            "secret",
        ]
        done = RUN.invoke(app, command)
        assert done.exit_code == 1, done.output
        assert server.asked == {**dict.fromkeys(names, 1), "busy": 3}
        assert 1 < server.most <= 4 and server.keys == {"Bearer secret"}
    found = {each["custom_id"]: each for each in map(json.loads, out.read_text().splitlines())}
    assert found.keys() == set(names) and len({each["id"] for each in found.values()}) == len(names)
    assert found["busy"]["response"] == {"status_code": 200, "request_id": "r1", "body": {"ok": 1}}
    assert found["wrong"]["response"] == {"status_code": 400, "request_id": "r1", "body": {"error": "no"}}
    assert found["moved"]["response"]["status_code"] == 307
    assert found["page"]["response"] is None and found["page"]["error"]["code"] == "invalid_response"
    assert all(found[name]["error"] is None for name in names if name != "page")
    assert "22 answered, 3 refused" in done.output
    assert "reasoning_effort: left out of 1" in done.output and "samplers: left out of 1" in done.output


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    file, out = written(tmp_path, *(line(name, prompt=name) for name in "abc")), tmp_path / "answers.jsonl"
    with answering(b=[(400, "{}", {}), (200, "{}", {})]) as (server, url):
        command = ["run-batch", "-i", str(file), "-o", str(out), "--url", url]
        assert RUN.invoke(app, command).exit_code == 1
        again = RUN.invoke(app, command)
        assert isinstance(again.exception, ConfigurationError) and "--resume" in str(again.exception)
        kept = [each for each in out.read_text().splitlines() if '"b"' not in each]
        with out.open("a") as cut:
            cut.write('{"id":"batch_req_7","cus')
        done = RUN.invoke(app, [*command, "--resume"])
        assert done.exit_code == 0 and "1 answered, 0 refused, 2 kept" in done.output
        assert server.asked == {"a": 1, "b": 2, "c": 1}
        found = out.read_text().splitlines()
        assert found[:2] == kept and json.loads(found[2])["custom_id"] == "b" and len(found) == 3


@pytest.mark.parametrize("end", ["", "\n"])
def test_another_file_is_not_overwritten(tmp_path: Path, end: str) -> None:
    file = written(tmp_path, json.dumps(line("a", prompt="x")) + end)
    before = file.read_bytes()
    with pytest.raises(ConfigurationError, match="no answer of a batch"):
        AnswersFile(file, resume=True)
    assert file.read_bytes() == before


def test_a_service_that_is_not_there_or_goes_away_ends_the_run(tmp_path: Path) -> None:
    requests = read_requests(written(tmp_path, line("a", prompt="x"), line("b", prompt="y")))
    began = time.monotonic()
    with pytest.raises(Unavailable, match="no service answers"):
        list(BatchRun(f"http://127.0.0.1:{free_port()}").lines(requests))
    assert time.monotonic() - began < 5
    with answering() as (_, url):
        lines = BatchRun(url, at_once=1, patience_s=1).lines(requests)
        assert next(lines)["custom_id"] == "a"
    # The second may have been asked for meanwhile.
    late = read_requests(written(tmp_path, *(line(f"{number}", prompt="z") for number in range(500))))
    with answering() as (_, url):
        lines = BatchRun(url, at_once=1, patience_s=1).lines(late)
        next(lines)
    with pytest.raises(Unavailable, match="no service answers"):
        list(lines)


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://a", "http://", "http://[::1", "http://a:99999", "http://a:b", "http://a b", "http://ä\n"],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        BatchRun(url)
    assert refused.value.field == "--url"


@pytest.mark.parametrize("key", ["a\nb", "a\r", "\u043a"])
def test_a_key_that_no_header_holds_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        BatchRun("http://127.0.0.1:1", api_key=key)
    assert str(refused.value).startswith("--api-key") and key not in str(refused.value)


@pytest.mark.parametrize("roots", ["", "no certificate", "\u00e4"])
def test_certificates_that_are_none_are_refused(roots: str) -> None:
    with pytest.raises(ConfigurationError, match="--tls-root"):
        BatchRun("https://127.0.0.1:1", roots=roots)


def test_a_run_that_never_began_is_run_again_as_it_was(tmp_path: Path) -> None:
    file, out = written(tmp_path, line("a", prompt="x")), tmp_path / "answers.jsonl"
    command = ["run-batch", "-i", str(file), "-o", str(out), "--url"]
    nobody = RUN.invoke(app, [*command, f"http://127.0.0.1:{free_port()}"])
    assert isinstance(nobody.exception, Unavailable) and "--resume" not in nobody.output
    with answering() as (_, url):
        done = RUN.invoke(app, [*command, url])
    assert done.exit_code == 0 and json.loads(out.read_text())["custom_id"] == "a"
