"""The default model on a real local Ray, end to end: what a person sees before a commit.

One service, asked over gRPC and HTTP, whose drafter is killed and whose router is replaced while it answers. Every answer is
that of plain decoding.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.models.target import BUILT_IN, resolve
from cluster.settings.config import load
from outrider import Client
from tests.running.ports import free_port
from tests.servers.checked_load import wait_until
from tests.servers.on_ray import Service

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

MESSAGE = {"role": "user", "content": "Repeat after me, twice: the rain in Spain falls mainly on the plain."}
OPTIONS: dict[str, Any] = {"messages": [MESSAGE], "max_tokens": 64, "ignore_eos": True, "temperature": 0.0, "seed": 5}


@pytest.fixture(scope="module")
def http_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def service(http_port: int) -> Iterator[Service]:
    model = resolve(BUILT_IN, load(environ={}).cache_dir)
    flags = [
        f"server.port={free_port()}", f"server.http_port={http_port}", "server.ops_port=0", "verifier.max_model_len=1024",
        "verifier.kv_cache_tokens=4096", "verifier.threads=1", "drafter.keep_calibration=false", "verifier.keep_learnt=false",
        # Under the measured budget it depends on the machine whether anything is drafted.
        "verifier.budget=fixed", "verifier.draft_deadline_s=10", "server.drain_delay_s=0.5",
        # Another router's settings are another verifier's. An answer that is not over when its verifier ends waits a minute for
        # the next one, which on a busy machine takes longer to load.
        "verifier.drain_s=300",
    ]  # fmt: skip
    running = Service(model.path, flags)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def expected(service: Service) -> tuple[int, ...]:
    with Client(service.address) as client:
        return client.generate(strategy="autoregressive", **OPTIONS).token_ids


def over_http(port: int) -> str:
    body = {"model": "tiny", **OPTIONS, "speculation": {"strategy": "prompt_lookup"}}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        text: str = json.load(answer)["choices"][0]["message"]["content"]
    return text


def status(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/outrider/status", timeout=60) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


def connected(port: int) -> bool:
    """Whether the one verifier that there is has its drafter."""
    return [each["drafters"] for each in status(port)["verifiers"]] == [{"the drafter": True}]


def test_the_same_tokens_over_grpc_and_http(service: Service, http_port: int, expected: tuple[int, ...]) -> None:
    with Client(service.address) as client:
        drafted = client.generate(strategy="prompt_lookup", **OPTIONS)
    assert drafted.token_ids == expected
    assert drafted.speculative_decoding.num_draft_tokens > 0
    assert over_http(http_port) == drafted.text


def test_it_gives_way_to_no_other_program(service: Service) -> None:
    for component in ("router", "drafter", "verifier"):
        own = os.getpriority(os.PRIO_PROCESS, service.ask(component, "process_id"))
        assert own == os.getpriority(os.PRIO_PROCESS, 0), component


def test_its_live_state(service: Service, http_port: int, expected: tuple[int, ...]) -> None:
    wait_until(lambda: connected(http_port))
    told = status(http_port)
    assert told["ready"] is True
    assert told["components"] == {name: {"running": 1} for name in ("router", "drafter", "verifier")}
    assert told["decoding"]["tokens"] >= len(expected)
    with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/", timeout=60) as page:
        assert page.headers["content-type"].startswith("text/html")


def test_a_drafter_that_is_killed_changes_no_token(service: Service, http_port: int, expected: tuple[int, ...]) -> None:
    victim = service.ask("drafter", "process_id")
    tokens: list[int] = []
    with Client(service.address) as client:
        for chunk in client.stream(strategy="blend", **OPTIONS):
            if not tokens:
                os.kill(victim, signal.SIGKILL)
            tokens += chunk.token_ids
    assert tuple(tokens) == expected
    wait_until(lambda: service.ask("drafter", "process_id") != victim)
    wait_until(lambda: connected(http_port) and status(http_port)["components"]["drafter"] == {"running": 1})


def test_a_router_that_is_replaced_costs_no_stream(service: Service, http_port: int, expected: tuple[int, ...]) -> None:
    before = service.ask("router", "process_id")
    with Client(service.address) as client:
        stream = client.stream(strategy="prompt_lookup", **OPTIONS)
        tokens = list(next(iter(stream)).token_ids)
        service.redeploy("router.num_speculative_tokens=6")
        tokens += [token for chunk in stream for token in chunk.token_ids]
    assert tuple(tokens) == expected
    assert service.ask("router", "process_id") != before
    with Client(service.address) as client:
        assert client.generate(strategy="prompt_lookup", **OPTIONS).token_ids == expected
    assert over_http(http_port)
