"""What a service on Ray has learnt of drafting is kept when it stops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider import Client
from tests.servers.on_ray import Service

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]


def test_the_next_start_begins_with_it(tiny_model: Path, tmp_path: Path) -> None:
    flags = [
        "server.port=0", "server.http_port=0", "verifier.max_model_len=512", "verifier.kv_cache_tokens=4096",
        "verifier.threads=1", f"cache_dir={tmp_path}",
    ]  # fmt: skip
    service = Service(tiny_model, flags)
    try:
        with Client(service.address) as client:
            client.generate("the quick brown fox and the quick", strategy="blend", max_tokens=64, ignore_eos=True)
    finally:
        service.stop()
    kept = [json.loads(file.read_text()) for file in (tmp_path / "costs").glob("*.json")]
    assert [each["measured"]["rates"] for each in kept if "contest" in each["about"]]
    assert any((tmp_path / "drafting").iterdir())
