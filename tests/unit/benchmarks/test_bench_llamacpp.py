"""The llama.cpp peer against a server that speaks as llama.cpp's does."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def chunk(tokens: list[int], so_far: int) -> str:
    return "data: " + json.dumps({"stop": False, "tokens": tokens, "timings": {"predicted_n": so_far}})


def end(so_far: int) -> str:
    return "data: " + json.dumps(
        {"stop": True, "tokens": [], "tokens_predicted": so_far, "timings": {"predicted_n": so_far}}
    )


class Engine:
    """Stands for ``xllamacpp``: ``script`` is what its servers answer.

    Attributes:
        started: the parameters of every server so far.
        asked: the bodies of all requests.
        together: a request is answered when so many are there.
    """

    def __init__(self) -> None:
        self.script: list[str] = [chunk([7], 1), end(1)]
        self.status = 200
        self.started: list[Any] = []
        self.asked: list[dict[str, Any]] = []
        self.together = threading.Barrier(1)
        self._http: list[ThreadingHTTPServer] = []

    def module(self) -> ModuleType:
        made = ModuleType("xllamacpp")
        made.__dict__.update(
            __version__="1",
            get_system_info=lambda: "CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | OPENMP = 1 | ",
            CommonParams=lambda: SimpleNamespace(
                model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace()
            ),
            Server=self._serve,
        )
        return made

    def _serve(self, params: Any) -> Any:
        engine = self
        self.started.append(params)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                engine.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                engine.together.wait(timeout=10)
                self.send_response(engine.status)
                self.end_headers()
                self.wfile.write("\n\n".join([":", *engine.script, ""]).encode())

            def log_message(self, *args: Any) -> None:
                pass

        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=http.serve_forever, daemon=True).start()
        self._http.append(http)
        return SimpleNamespace(listening_address=f"http://127.0.0.1:{http.server_port}")

    def close(self) -> None:
        for http in self._http:
            http.shutdown()
            http.server_close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


@pytest.fixture
def peer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "xllamacpp", engine.module())
    monkeypatch.delitem(sys.modules, "benchmarks.peers.peer_llamacpp", raising=False)
    made = importlib.import_module("benchmarks.peers.peer_llamacpp")
    monkeypatch.delitem(sys.modules, "benchmarks.peers.peer_llamacpp")
    return made.Peer({"gguf": "model.gguf", "threads": 2, "device": "cpu"})


def load(requests: int = 1, concurrency: int = 1, prompt: int = 3, temperature: float = 0.0) -> dict[str, Any]:
    return {
        "concurrency": concurrency,
        "max_tokens": 8,
        "temperature": temperature,
        "requests": [{"prompt": list(range(prompt)), "seed": 2**32 + number} for number in range(requests)],
    }


def test_every_token_is_counted_when_it_came(engine: Engine, peer: Any) -> None:
    # The three tokens of a character come as one chunk that names the last of them; two more never end theirs.
    engine.script = [chunk([5], 1), chunk([9], 4), chunk([2], 5), end(7)]
    (answer,) = peer.run("llamacpp", load())["answers"]
    assert answer["tokens"] == [5, -1, -1, 9, 2, -1, -1]
    assert [count for _, count in answer["arrivals"]] == [1, 3, 1, 2]
    times = [at for at, _ in answer["arrivals"]]
    assert times == sorted(times)
    assert times[0] > 0


def test_so_many_requests_are_sent_at_once(engine: Engine, peer: Any) -> None:
    # Nobody is answered before four are there.
    engine.together = threading.Barrier(4)
    answered = peer.run("llamacpp", load(requests=8, concurrency=4))
    assert [answer["tokens"] for answer in answered["answers"]] == [[7]] * 8
    assert engine.started[-1].n_parallel == 4
    assert engine.started[-1].n_ctx >= 4 * (3 + 8)


def test_a_server_is_started_anew_only_where_slots_or_room_do_not_do(engine: Engine, peer: Any) -> None:
    for run, servers in ((load(), 1), (load(prompt=1000), 1), (load(prompt=1100), 2), (load(), 2), (load(4, 4), 3)):
        peer.run("llamacpp", run)
        assert len(engine.started) == servers
    params = engine.started[1]
    assert params.n_ctx >= 1100 + 8
    assert params.cpuparams.n_threads == params.cpuparams_batch.n_threads == 2
    assert params.n_gpu_layers == 0


def test_nothing_but_what_is_measured_is_asked_for(engine: Engine, peer: Any) -> None:
    peer.run("llamacpp", load())
    peer.run("llamacpp", load(temperature=0.7))
    greedy, sampled = engine.asked
    assert (greedy["samplers"], greedy["top_k"]) == (["top_k"], 1)
    assert (sampled["samplers"], sampled["temperature"], sampled["seed"]) == (["temperature"], 0.7, 0)
    assert greedy["prompt"] == [0, 1, 2]
    assert not greedy["cache_prompt"]


@pytest.mark.examples(3)
@pytest.mark.parametrize(
    ("status", "script", "says"),
    [
        (400, ['{"error": "too long"}'], "(?s)the server says 400.*too long"),
        (200, [chunk([5], 1), 'data: {"error": {"message": "out of luck"}}'], "broke off.*out of luck"),
        (200, ['error: {"message": "out of luck"}'], "broke off.*out of luck"),
    ],
)
def test_what_the_server_complains_of_is_passed_on(
    engine: Engine, peer: Any, status: int, script: list[str], says: str
) -> None:
    engine.status, engine.script = status, script
    with pytest.raises(RuntimeError, match=says):
        peer.run("llamacpp", load())


def test_versions_name_the_instructions_that_it_was_built_for(peer: Any) -> None:
    assert peer.versions() == {"xllamacpp": "1", "built for": "SSE3/AVX2/OPENMP"}
