"""LoRA adapters with two verifiers on Ray: both have one or none has it, and an answer that moves keeps its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from outrider import Client
from services.verifier.kernels.native.library import library
from tests.lora import make_adapter
from tests.on_ray import Service
from tests.ports import free_port

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(library("auto") is None, reason="no kernels of our own can be compiled here"),
]

PROMPT = tuple(range(40, 120))
OPTIONS: dict[str, Any] = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("adapters")
    for seed in (1, 2):
        make_adapter(made / f"{seed}", tiny_model, seed=seed)
    return made


@pytest.fixture(scope="module")
def service(tiny_model: Path, folder: Path) -> Iterator[tuple[Service, str]]:
    port = free_port()
    flags = [
        f"server.http_port={port}", f"verifier.lora_folders=[{folder}]", "verifier.replicas=2", "verifier.num_cpus=0.25",
        f"server.port={free_port()}", "server.ops_port=0", "verifier.max_model_len=512", "verifier.kv_cache_tokens=4096",
        "verifier.threads=1", "verifier.budget=fixed", "drafter.keep_calibration=false", "verifier.drain_s=1",
        "server.drain_delay_s=0.5",
    ]  # fmt: skip
    running = Service(tiny_model, flags, stderr=subprocess.PIPE)
    yield running, f"http://127.0.0.1:{port}"
    running.stop()


def post(url: str, path: str, **body: str) -> httpx2.Response:
    return httpx2.post(f"{url}{path}", json=body, timeout=120)


def test_both_verifiers_have_it_or_none(service: tuple[Service, str], folder: Path) -> None:
    running, url = service
    loaded = post(url, "/v1/load_lora_adapter", lora_name="one", lora_path=str(folder / "1"))
    assert loaded.status_code == 200, loaded.text
    with Client(running.address) as client:
        # The beginning says which verifier gets a request.
        prompts = [(start, *PROMPT) for start in range(20, 36)]
        texts = [client.generate(token_ids=prompt, model="one", **OPTIONS).token_ids for prompt in prompts]
        plain = [client.generate(token_ids=prompt, **OPTIONS).token_ids for prompt in prompts]
        assert all(one != other for one, other in zip(texts, plain, strict=True))
        assert min(stats["times"]["steps"] for stats in running.ask_all("verifier", "loop_stats")) > 0
    gone = post(url, "/v1/unload_lora_adapter", lora_name="one")
    assert gone.status_code == 200, gone.text
    refused = post(url, "/v1/completions", prompt="a", model="one")
    assert refused.status_code == 404
    missing = post(url, "/v1/load_lora_adapter", lora_name="one", lora_path=str(folder / "nothing there"))
    assert missing.status_code == 400, missing.text
