"""Numbers by vLLM's names: one series of each, there before anything is counted, and read as `vllm bench serve` reads them."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.observing import Observing
from cluster.settings.config import load
from services.access.gate import open_gate
from services.access.key_records import hash_key
from services.api.config import HttpConfig, PublicServerConfig
from services.api.http.server import serve_http
from services.metrics.families import FAMILIES
from services.metrics.prometheus_sink import PrometheusSink
from services.metrics.vllm_names import NAMES, VllmNames
from tests.scripted_router import ScriptedRouter


def values(text: bytes) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, sample.labels.get("position", "")): sample.value for family in families for sample in family.samples
    }


def test_strategies_are_added_up_and_positions_are_kept() -> None:
    sink = PrometheusSink()
    names = VllmNames(sink.collect, lambda: "tiny")
    for name in NAMES:
        if FAMILIES[name].kind == "counter":
            sink.counter(name)
    assert values(names.exposition())["vllm:spec_decode_num_drafts_total", ""] == 0.0
    for strategy in ("suffix", "ngram"):
        sink.counter("spec_decode_num_drafts_total").add(2, strategy)
        sink.counter("spec_decode_num_accepted_tokens_per_pos_total").add(1, strategy, "0")
    sink.counter("spec_decode_num_accepted_tokens_per_pos_total").add(1, "suffix", "1")
    sink.gauge("kv_cache_usage_ratio").set(0.25)
    found = values(names.exposition())
    assert found["vllm:spec_decode_num_drafts_total", ""] == 4
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"] == 2
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"] == 1
    assert found["vllm:kv_cache_usage_perc", ""] == 0.25
    assert b'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25' in names.exposition()


def test_times_keep_their_buckets() -> None:
    sink = PrometheusSink()
    sink.histogram("time_to_first_token_seconds").observe(0.3)
    text = VllmNames(sink.collect, lambda: "tiny").exposition().decode()
    assert 'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5",model_name="tiny"} 1.0' in text
    assert 'vllm:time_to_first_token_seconds_sum{engine="0",model_name="tiny"} 0.3' in text


def test_all_names_are_ours() -> None:
    assert {*NAMES} <= {*FAMILIES} and len({*NAMES.values()}) == len(NAMES)


def test_a_setting_adds_them() -> None:
    for wanted in (False, True):
        observing = Observing(load(flags=[f"metrics.vllm_names={str(wanted).lower()}"], environ={}), on_ray=False)
        observing.router(ScriptedRouter(), "tiny")
        assert (b"vllm:prompt_tokens_total{" in observing.exposition()) is wanted
        assert b"outrider_prompt_tokens_total" in observing.exposition()


@pytest.mark.parametrize(
    ("keys", "scopes", "status"), [(False, "", 200), (True, "scopes: [generate]", 403), (True, "scopes: [observe]", 200)]
)
async def test_the_api_port_has_them_for_those_who_may_see_them(
    tmp_path: Path, keys: bool, scopes: str, status: int
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"- hash: {hash_key('k' * 20)}\n  id: one\n  tenant: one\n  {scopes}\n")
    public = PublicServerConfig(port=0, keys_file=file if keys else None)
    gate = open_gate((), public.keys_file, None)
    server = await serve_http(ScriptedRouter(), HttpConfig(port=0, metrics=True, public=public), gate, lambda: b"vllm:a 1\n")
    async with httpx2.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/metrics")).status_code == (401 if keys else 200)
        found = await client.get("/metrics", headers={"x-api-key": "k" * 20} if keys else {})
    await server.stop(0)
    gate.close()
    assert found.status_code == status
    assert (found.text == "vllm:a 1\n") is (status == 200)
