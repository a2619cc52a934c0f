"""The page in a real browser, in front of a service on Ray: a verifier that is killed is seen, and so is the one that follows."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.on_ray import Service
from tests.page.asking import answer_of, send, whole_answer
from tests.page.conftest import Open
from tests.ports import free_port

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

MESSAGE = "one two three one two three"


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def service_on_ray(tiny_model: Path, port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    flags = [
        f"server.port={free_port()}", f"server.http_port={port}", "server.ops_port=0", "verifier.max_model_len=512",
        "verifier.kv_cache_tokens=4096", "verifier.threads=1", "verifier.budget=fixed", "drafter.keep_calibration=false",
        f"cache_dir={tmp_path_factory.mktemp('cache')}",
    ]  # fmt: skip
    running = Service(tiny_model, flags)
    yield running
    running.stop()


def test_a_killed_verifier_shows_and_heals(open_page: Open, service_on_ray: Service, port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    whole = whole_answer(url, MESSAGE, temperature=0, max_tokens=400)
    assert whole["usage"]["completion_tokens"] > 100
    page = open_page(url)
    page.set_default_timeout(180_000)
    page.locator("#health.good").wait_for()
    assert "1 verifier running" in page.locator("#parts li").all_inner_texts()
    victim = service_on_ray.ask("verifier", "process_id")
    send(page, MESSAGE, strategy="autoregressive", length="400")
    page.locator(".answer.busy .token").first.wait_for()
    os.kill(victim, signal.SIGKILL)
    page.locator("#health:is(.bad, .warn)").wait_for()
    page.locator("#health.good").wait_for()
    page.locator(".answer.busy").wait_for(state="detached")
    # The answer under way has moved to the next verifier, with the same tokens.
    assert answer_of(page) == whole["choices"][0]["message"]["content"]
    assert service_on_ray.ask("verifier", "process_id") != victim
