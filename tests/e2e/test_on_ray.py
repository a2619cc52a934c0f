"""The service on a real local Ray: four processes, gRPC between them, and what happens when one of them dies, also on the page in a
real browser.

One service for all tests, since a Ray and its replicas take half a minute to start. An index is published in the last test but one.
"""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import outrider
from cli.scraping import Reading, read
from outrider import Client
from retrieval_index.embedded import embedded_redis
from retrieval_index.store import IndexStore
from tests.drafters.indexes import build_of
from tests.page import conftest as pages
from tests.page.asking import answer_of, send, whole_answer
from tests.running.ports import free_port
from tests.servers.checked_load import wait_until
from tests.servers.on_ray import Service

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def redis() -> Iterator[str]:
    with embedded_redis() as url:
        yield url


@pytest.fixture(scope="module")
def ops_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def http_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def service(
    tiny_model: Path, redis: str, ops_port: int, http_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    flags = [
        "server.port=0", f"server.ops_port={ops_port}", f"server.http_port={http_port}", "server.metrics=true", "metrics.names_of=[vllm]",
        "verifier.max_model_len=512", "verifier.kv_cache_tokens=4096", "verifier.threads=1",
        "verifier.budget=fixed", "drafter.keep_calibration=false", f"retrieval.redis_url={redis}", "retrieval.name=e2e",
        f"cache_dir={tmp_path_factory.mktemp('cache')}",
        # Drafts are waited for on busy machines too; the first look-up of a process takes longer than later ones.
        "verifier.draft_deadline_s=10", "drafter.retrieval_deadline_s=1",
    ]  # fmt: skip
    running = Service(tiny_model, flags)
    yield running
    running.stop()


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with Client(service.address) as connected:
        yield connected


# Fixtures of a page in a browser.
browser, complaints, serve, open_page = pages.browser, pages.complaints, pages.serve, pages.open_page

PROMPT = "the quick brown fox and the quick brown dog"


def test_what_is_open_to_other_users_and_machines(service: Service) -> None:
    """Ray's folder to no other user; to other machines no port that tells metrics, of which three ask for no token."""
    ours = [psutil.Process(service.process.pid), *psutil.Process(service.process.pid).children(recursive=True)]
    (raylet,) = (each for each in ours if each.name() == "raylet")
    (folder,) = (Path(word.partition("=")[2]) for word in raylet.cmdline() if word.startswith("--session_dir="))
    private = [each for each in folder.parents if each.exists() and not each.stat().st_mode & 0o077]
    assert [each.stat().st_uid for each in private] == [os.geteuid()]
    listening = {
        (found.laddr.ip, found.laddr.port)
        for each in ours
        for found in each.net_connections("tcp")
        if found.status == psutil.CONN_LISTEN
    }
    telling = {(host.removeprefix("::ffff:"), port) for host, port in listening if tells_numbers(port)}
    assert len(telling) >= 3 and {host for host, _ in telling} <= {"127.0.0.1", "::1"}
    # Serve's replicas alone listen elsewhere; they ask for the token.
    open_to_all = {host for host, _ in listening} - {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert open_to_all <= {"::"}


def tells_numbers(port: int) -> bool:
    """Whether somebody without a token gets metrics there."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return b"# HELP" in answer.read()
    except (OSError, http.client.HTTPException):
        return False


def test_same_tokens_under_every_strategy(client: Client) -> None:
    for sampling in ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "presence_penalty": 0.5, "seed": 4}):
        answers = [
            client.generate(PROMPT, strategy=strategy, max_tokens=80, ignore_eos=True, **sampling)  # type: ignore[arg-type]
            for strategy in ("autoregressive", "prompt_lookup")
        ]
        assert answers[0].token_ids == answers[1].token_ids
        assert answers[0].speculative_decoding.num_draft_tokens == 0
    assert answers[0].speculative_decoding.strategy == "autoregressive"


def test_drafts_come_over_grpc(client: Client) -> None:
    answer = client.generate(token_ids=[40, 41, 42] * 12, strategy="prompt_lookup", max_tokens=60, ignore_eos=True)
    assert answer.speculative_decoding.num_draft_tokens > 0


def test_rays_agents_tell_the_numbers_of_all_components(client: Client, ops_port: int) -> None:
    def numbers() -> Reading:
        return read([f"http://127.0.0.1:{ops_port}/metrics"])

    # No other test here uses this strategy. Ray's agents renew what they tell every ten seconds.
    name = "spec_decode_num_draft_tokens_total"
    answer = client.generate(token_ids=[40, 41, 42] * 12, strategy="suffix", max_tokens=60, ignore_eos=True)
    drafted = answer.speculative_decoding.num_draft_tokens
    wait_until(lambda: numbers().sum(name, strategy="suffix") >= drafted > 0)
    wait_until(lambda: numbers().sum("generation_tokens_total") >= 60)
    wait_until(lambda: numbers().sum("drafter_nodes_total", source="suffix") >= drafted)
    wait_until(lambda: numbers().sum("ready") == 1)
    now = numbers()
    assert now.sum(name, strategy="suffix") == drafted
    assert now.sum("requests_total", outcome="length") >= 1
    for path, status in (("health", "alive"), ("ready", "ready")):
        with urllib.request.urlopen(f"http://127.0.0.1:{ops_port}/{path}", timeout=30) as told:
            assert status in told.read().decode()


def test_the_api_port_adds_up_what_rays_agents_tell(client: Client, http_port: int) -> None:
    def numbers() -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/metrics", timeout=30) as told:
            lines = [line.rpartition(" ") for line in told.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    answer = client.generate(token_ids=[50, 51, 52] * 12, strategy="anpd", max_tokens=60, ignore_eos=True)
    drafted = answer.speculative_decoding.num_draft_tokens
    ours, theirs = 'outrider_spec_decode_num_draft_tokens_total{strategy="anpd"}', "vllm:spec_decode_num_draft_tokens_total"
    wait_until(lambda: numbers().get(ours, 0) >= drafted > 0)
    now = numbers()
    assert now[ours] == drafted
    every = sum(value for name, value in now.items() if name.startswith("outrider_spec_decode_num_draft_tokens_total"))
    assert now[theirs + '{engine="0",model_name="tiny"}'] == every


def test_what_is_remembered_can_be_deleted(client: Client) -> None:
    options = {
        "token_ids": [90, 91, 92, 93],
        "strategy": "recycling",
        "max_tokens": 60,
        "ignore_eos": True,
        "temperature": 1.0,
    }
    answers = set()

    def accepted() -> int:
        answer = client.generate(seed=77, **options)  # type: ignore[arg-type]
        answers.add(answer.token_ids)
        return answer.speculative_decoding.num_accepted_draft_tokens

    # Drafts that come too late are none: how often it has to be said depends on the machine.
    wait_until(lambda: accepted() > 30)
    client.forget()
    assert accepted() < 15
    assert len(answers) == 1


def test_forgetting_says_who_did_not_answer(service: Service) -> None:
    drafter = service.ask("drafter", "process_id")
    os.kill(drafter, signal.SIGSTOP)
    # Each try takes as long as verifiers and routers wait for those that hang.
    once = outrider.Retry(attempts=1)
    try:
        with Client(service.address, retry=once) as client, pytest.raises(outrider.Unavailable) as caught:
            client.forget()
    finally:
        os.kill(drafter, signal.SIGCONT)
    # Which of the two it says depends on who gives up first. A hung drafter that is being replaced counts, too; then the verifier
    # may have had its new one's word already.
    said = str(caught.value)
    assert re.search("not all of [12] drafter replicas answered|1 of [12] drafter replicas did not answer", said)
    assert "1 of 1 verifier replicas did not answer" in said or "of 2 drafter replicas" in said

    def forgotten() -> bool:
        try:
            with Client(service.address, retry=once) as client:
                client.forget()
        except outrider.Unavailable:
            return False
        return True

    wait_until(forgotten)


def test_errors_keep_their_kind_and_say_nothing_of_the_inside(client: Client) -> None:
    with pytest.raises(outrider.InvalidArgument) as caught:
        client.generate(PROMPT, stop_token_ids=[10**6])
    assert caught.value.field == "stop_token_ids"
    assert str(caught.value).startswith("stop_token_ids is 1000000: must be token ids below")
    assert "Traceback" not in str(caught.value)
    with pytest.raises(outrider.InvalidArgument) as caught:
        client.generate(PROMPT, strategy="magic")
    assert caught.value.field == "speculation.strategy"
    assert caught.value.allowed.startswith("one of anpd, auto, autoregressive")


def test_the_service_says_that_it_serves(service: Service) -> None:
    with grpc.insecure_channel(service.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        wait_until(lambda: stub.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING)


def test_leaving_frees_the_verifier(service: Service, client: Client) -> None:
    for _ in range(3):
        with client.stream(PROMPT, max_tokens=450, ignore_eos=True) as stream:
            next(stream)
    wait_until(lambda: service.ask("verifier", "running") == 0)


def test_the_public_port_is_on_loopback_only(service: Service) -> None:
    port = int(service.address.rpartition(":")[2])
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {
        "127.0.0.1",
        "127.0.1.1",
    }
    for host in others:
        with pytest.raises(OSError), socket.create_connection((str(host), port), timeout=2):
            pass


REPEATED: dict[str, Any] = {"token_ids": [40, 41, 42] * 12, "ignore_eos": True, "temperature": 1.0, "seed": 9}


def test_killing_the_drafter_changes_no_token_and_it_comes_back(service: Service, client: Client) -> None:
    options = {**REPEATED, "max_tokens": 400}
    expected = client.generate(strategy="autoregressive", **options)
    victim = service.ask("drafter", "process_id")
    gaps, tokens, killed_at, last = [], [], None, time.monotonic()
    for chunk in client.stream(strategy="prompt_lookup", **options):
        now = time.monotonic()
        gaps.append(now - last)
        last = now
        tokens += chunk.token_ids
        if killed_at is None and len(tokens) > 20:
            os.kill(victim, signal.SIGKILL)
            killed_at = len(tokens)
    assert killed_at is not None
    assert tuple(tokens) == expected.token_ids
    # Two steps that wait for their deadline would take 20 s. The machine may be busy with Ray's own reaction.
    assert max(gaps[1:]) < 20

    def back_in_use() -> bool:
        answer = client.generate(strategy="prompt_lookup", **{**options, "max_tokens": 40, "temperature": 0.0})
        return answer.speculative_decoding.num_draft_tokens > 0

    wait_until(back_in_use)
    assert service.ask("drafter", "process_id") != victim


def test_killing_the_verifier_delays_the_answer_and_changes_no_token(service: Service, client: Client) -> None:
    options = {**REPEATED, "max_tokens": 300}
    expected = client.generate(strategy="autoregressive", **options)
    victim = service.ask("verifier", "process_id")
    tokens: list[int] = []
    with client.stream(strategy="prompt_lookup", **options) as stream:
        for chunk in stream:
            if not tokens:
                os.kill(victim, signal.SIGKILL)
            tokens += chunk.token_ids
    assert tuple(tokens) == expected.token_ids
    assert stream.result is not None
    assert stream.result.usage.completion_tokens == 300
    assert service.ask("verifier", "process_id") != victim


SAMPLED: dict[str, Any] = {"token_ids": [40, 41, 42, 43], "max_tokens": 60, "ignore_eos": True, "temperature": 0.9}


def test_an_index_comes_into_use_changes_and_survives(
    service: Service, client: Client, redis: str, tiny_model: Path, tmp_path: Path
) -> None:
    plain = {seed: client.generate(strategy="autoregressive", seed=seed, **SAMPLED) for seed in (1, 2)}
    # Nothing is published yet: no drafts, the same tokens.
    assert client.generate(strategy="rest", seed=1, **SAMPLED).token_ids == plain[1].token_ids

    def found(seed: int) -> bool:
        answer = client.generate(strategy="rest", seed=seed, **SAMPLED)
        assert answer.token_ids == plain[seed].token_ids
        return answer.speculative_decoding.num_accepted_draft_tokens > 20

    versions = []
    for seed in (1, 2):
        build_of(tmp_path / str(seed), tiny_model, (*SAMPLED["token_ids"], *plain[seed].token_ids))
        with IndexStore(redis, "e2e") as store:
            versions.append(store.publish(tmp_path / str(seed)))
        wait_until(lambda: service.ask("retrieval", "version") == versions[-1])
        # It has all been said before.
        wait_until(partial(found, seed))
    victim = service.ask("retrieval", "process_id")
    os.kill(victim, signal.SIGKILL)
    for strategy in ("rest", "spectra", "blend"):
        assert client.generate(strategy=strategy, seed=2, **SAMPLED).token_ids == plain[2].token_ids
    wait_until(partial(found, 2))
    assert service.ask("retrieval", "process_id") != victim


def test_a_killed_verifier_shows_on_the_page_and_heals(open_page: pages.Open, service: Service, http_port: int) -> None:
    url, message = f"http://127.0.0.1:{http_port}", "one two three one two three"
    whole = whole_answer(url, message, temperature=0, max_tokens=400)
    assert whole["usage"]["completion_tokens"] > 100
    page = open_page(url)
    page.set_default_timeout(180_000)
    page.locator("#health.good").wait_for()
    assert "1 verifier running" in page.locator("#parts li").all_inner_texts()
    victim = service.ask("verifier", "process_id")
    send(page, message, strategy="autoregressive", length="400")
    page.locator(".answer.busy .token").first.wait_for()
    os.kill(victim, signal.SIGKILL)
    page.locator("#health:is(.bad, .warn)").wait_for()
    page.locator("#health.good").wait_for()
    page.locator(".answer.busy").wait_for(state="detached")
    # The answer under way has moved to the next verifier, with the same tokens.
    assert answer_of(page) == whole["choices"][0]["message"]["content"]
    assert service.ask("verifier", "process_id") != victim
