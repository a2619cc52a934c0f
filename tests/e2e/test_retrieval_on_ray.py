"""The retrieval service on a real local Ray: an index published while it serves, used, exchanged, and its process killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider import Client
from retrieval_index.build import BuildConfig, Target, build_index
from retrieval_index.embedded import embedded_redis
from retrieval_index.manifest import tokenizer_digest
from retrieval_index.perplexity import ModelScorer
from retrieval_index.store import IndexStore
from tests.e2e.test_on_ray import Service
from tests.indexes import document

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OPTIONS: dict[str, Any] = {"token_ids": [40, 41, 42, 43], "max_tokens": 60, "ignore_eos": True, "temperature": 0.9}


def build_of(folder: Path, model: Path, tokens: tuple[int, ...]) -> None:
    """An index whose whole corpus is one answer."""
    target = Target(name="tiny", tokenizer_sha256=tokenizer_digest(model), vocab_size=320)
    scorer: Callable[[], ModelScorer] = lambda: ModelScorer(model)  # noqa: E731
    build_index([document(str(folder))], target, lambda text: tokens, scorer, folder, BuildConfig(keep=1.0))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_an_index_comes_into_use_changes_and_survives(tiny_model: Path, tmp_path: Path) -> None:
    with embedded_redis() as redis:
        flags = [
            "server.port=0", "verifier.max_model_len=512", "verifier.kv_cache_tokens=4096", "verifier.threads=1",
            "verifier.budget=fixed", f"retrieval.redis_url={redis}", "retrieval.name=e2e", f"cache_dir={tmp_path / 'cache'}",
            # The first look-up of a process takes longer than later ones.
            "drafter.retrieval_deadline_s=0.5",
        ]  # fmt: skip
        service = Service(tiny_model, flags)
        try:
            with Client(service.address) as client:
                plain = {seed: client.generate(strategy="autoregressive", seed=seed, **OPTIONS) for seed in (1, 2)}
                # Nothing is published yet: no drafts, the same tokens.
                assert client.generate(strategy="rest", seed=1, **OPTIONS).token_ids == plain[1].token_ids
                store = IndexStore(redis, "e2e")
                versions = []
                for seed in (1, 2):
                    build_of(tmp_path / str(seed), tiny_model, (*OPTIONS["token_ids"], *plain[seed].token_ids))
                    versions.append(store.publish(tmp_path / str(seed)))
                    wait_for(lambda: service.ask("retrieval", "version") == versions[-1])
                    answer = client.generate(strategy="rest", seed=seed, **OPTIONS)
                    assert answer.token_ids == plain[seed].token_ids
                    # It has all been said before.
                    assert answer.speculative_decoding.num_accepted_draft_tokens > 20
                victim = service.ask("retrieval", "process_id")
                os.kill(victim, signal.SIGKILL)
                for strategy in ("rest", "spectra", "blend"):
                    assert client.generate(strategy=strategy, seed=2, **OPTIONS).token_ids == plain[2].token_ids

                def found_again() -> bool:
                    answer = client.generate(strategy="rest", seed=2, **OPTIONS)
                    assert answer.token_ids == plain[2].token_ids
                    return answer.speculative_decoding.num_accepted_draft_tokens > 20

                wait_for(found_again)
                assert service.ask("retrieval", "process_id") != victim
        finally:
            service.stop()
