"""LoRA adapters with two verifiers on Ray: both have one or none has it. And then with one verifier of two stages of two ranks that Ray
has placed: the same tokens with and without an adapter, and a stage that is killed comes back.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from outrider import AsyncClient, Client
from tests.kernels.kernels_here import needs_kernels
from tests.running.ports import free_port
from tests.servers.on_ray import Service
from tests.servers.service import served
from tests.tiny_models.lora import WITH_ENDS, make_adapter

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(600),
    needs_kernels,
]

PROMPT = tuple(range(40, 120))
OPTIONS: dict[str, Any] = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
# Its tokens come again, so there are drafts for all of the answer.
LONG: dict[str, Any] = {
    "token_ids": [40, 41, 42] * 12,
    "max_tokens": 60,
    "temperature": 1.0,
    "seed": 9,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("adapters")
    for seed in (1, 2):
        make_adapter(made / f"{seed}", tiny_model, seed=seed, targets=WITH_ENDS)
    return made


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def service(tiny_model: Path, folder: Path, port: int) -> Iterator[Service]:
    flags = [
        f"server.http_port={port}", f"verifier.lora_folders=[{folder}]", "verifier.num_cpus=0.25", "verifier.replicas=2",
        f"server.port={free_port()}", "server.ops_port=0", "verifier.max_model_len=512", "verifier.kv_cache_tokens=4096",
        "verifier.threads=1", "verifier.budget=fixed", "drafter.keep_calibration=false", "verifier.drain_s=1",
        "server.drain_delay_s=0.5",
    ]  # fmt: skip
    running = Service(tiny_model, flags, stderr=subprocess.PIPE)
    yield running
    running.stop()


def post(port: int, path: str, **body: str) -> httpx2.Response:
    return httpx2.post(f"http://127.0.0.1:{port}{path}", json=body, timeout=120)


def test_both_verifiers_have_it_or_none(service: Service, port: int, folder: Path) -> None:
    loaded = post(port, "/v1/load_lora_adapter", lora_name="one", lora_path=str(folder / "1"))
    assert loaded.status_code == 200, loaded.text
    with Client(service.address) as client:
        # The beginning says which verifier gets a request.
        prompts = [(start, *PROMPT) for start in range(20, 36)]
        texts = [client.generate(token_ids=prompt, model="one", **OPTIONS).token_ids for prompt in prompts]
        plain = [client.generate(token_ids=prompt, **OPTIONS).token_ids for prompt in prompts]
        assert all(one != other for one, other in zip(texts, plain, strict=True))
        assert min(stats["times"]["steps"] for stats in service.ask_all("verifier", "loop_stats")) > 0
    gone = post(port, "/v1/unload_lora_adapter", lora_name="one")
    assert gone.status_code == 200, gone.text
    refused = post(port, "/v1/completions", prompt="a", model="one")
    assert refused.status_code == 404
    missing = post(port, "/v1/load_lora_adapter", lora_name="one", lora_path=str(folder / "nothing there"))
    assert missing.status_code == 400, missing.text


def stages() -> list[psutil.Process]:
    """Ray names an actor's process after it."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any("ray::Stage" in part for part in process.info["cmdline"] or ()):
            found.append(process)
    return found


async def in_one_process(model: Path, folder: Path) -> dict[str, tuple[int, ...]]:
    """The model's own answer by plain decoding, and those with its adapters."""
    found = {}
    flag = f"verifier.lora_modules={{one: {folder}/1, two: {folder}/2}}"
    async with served(model, flag) as (address, _), AsyncClient(address) as client:
        for name in ("tiny", "one", "two"):
            found[name] = (await client.generate(model=name, strategy="autoregressive", **LONG)).token_ids
    return found


def test_over_stages_and_ranks(service: Service, port: int, tiny_model: Path, folder: Path) -> None:
    """Answers are those of one process, and go on when a process of the target is killed, which then has the adapters again."""
    wanted = asyncio.run(in_one_process(tiny_model, folder))
    assert len(set(wanted.values())) == 3
    ranks = ("verifier.replicas=1", "verifier.stages=2", "verifier.tensor_parallel_size=2")
    service.redeploy(*ranks, f"verifier.lora_modules={{one: {folder}/1}}")
    with Client(service.address) as client:
        # Two ranks of each stage, one of which is the verifier itself.
        assert len(stages()) == 3
        loaded = post(port, "/v1/load_lora_adapter", lora_name="two", lora_path=str(folder / "2"))
        assert loaded.status_code == 200, loaded.text
        for name, tokens in wanted.items():
            for strategy in ("autoregressive", "prompt_lookup"):
                assert client.generate(model=name, strategy=strategy, **LONG).token_ids == tokens
        victim = stages()[0].pid
        begun: list[int] = []
        with client.stream(model="two", strategy="prompt_lookup", **LONG) as stream:
            for chunk in stream:
                if not begun:
                    os.kill(victim, signal.SIGKILL)
                begun += chunk.token_ids
        assert tuple(begun) == wanted["two"] and victim not in [process.pid for process in stages()]
        for name, tokens in wanted.items():
            assert client.generate(model=name, **LONG).token_ids == tokens
        gone = post(port, "/v1/unload_lora_adapter", lora_name="two")
        assert gone.status_code == 200, gone.text
        assert post(port, "/v1/completions", prompt="a", model="two").status_code == 404
