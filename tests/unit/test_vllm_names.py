"""Numbers by vLLM's names: one series of each, there before anything is counted, and read as `vllm bench serve` reads them."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.process.observing import Observing
from cluster.settings.config import load
from services.access.gate import open_gate
from services.access.key_records import hash_key
from services.api.config import HttpConfig, PublicServerConfig
from services.api.http.server import serve_http
from services.metrics.added_up import added_up
from services.metrics.families import FAMILIES
from services.metrics.prometheus_sink import PrometheusSink, written
from services.metrics.vllm_names import NAMES, by_vllm_names
from tests.scripted_router import ScriptedRouter


def values(text: bytes) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, sample.labels.get("position", "")): sample.value for family in families for sample in family.samples
    }


def told(sink: PrometheusSink) -> bytes:
    return written(by_vllm_names(sink.collect(), "tiny"))


def test_strategies_are_added_up_and_positions_are_kept() -> None:
    sink = PrometheusSink()
    for name in NAMES:
        if FAMILIES[name].kind == "counter":
            sink.counter(name)
    assert values(told(sink))["vllm:spec_decode_num_drafts_total", ""] == 0.0
    for strategy in ("suffix", "ngram"):
        sink.counter("spec_decode_num_drafts_total").add(2, strategy)
        sink.counter("spec_decode_num_accepted_tokens_per_pos_total").add(1, strategy, "0")
    sink.counter("spec_decode_num_accepted_tokens_per_pos_total").add(1, "suffix", "1")
    sink.gauge("kv_cache_usage_ratio").set(0.25)
    found = values(told(sink))
    assert found["vllm:spec_decode_num_drafts_total", ""] == 4
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"] == 2
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"] == 1
    assert found["vllm:kv_cache_usage_perc", ""] == 0.25
    assert b'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25' in told(sink)


def test_times_keep_their_buckets() -> None:
    sink = PrometheusSink()
    sink.histogram("time_to_first_token_seconds").observe(0.3)
    text = told(sink).decode()
    assert 'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5",model_name="tiny"} 1.0' in text
    assert 'vllm:time_to_first_token_seconds_sum{engine="0",model_name="tiny"} 0.3' in text


def test_all_names_are_ours() -> None:
    assert {*NAMES} <= {*FAMILIES} and len({*NAMES.values()}) == len(NAMES)


def test_a_setting_adds_them() -> None:
    for wanted in (False, True):
        observing = Observing(load(flags=[f"metrics.vllm_names={str(wanted).lower()}"], environ={}), on_ray=False)
        observing.router(ScriptedRouter(), "tiny")
        assert (b"vllm:prompt_tokens_total{" in observing.exposition()) is wanted
        assert observing.gathered() == observing.exposition()
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


def test_what_rays_agents_say_is_added_up() -> None:
    def said(worker: str, drafts: int, used: float) -> str:
        labels = f'WorkerId="{worker}",SessionName="s"'
        return "\n".join(
            [
                "# TYPE ray_outrider_spec_decode_num_drafts_total counter",
                f'ray_outrider_spec_decode_num_drafts_total{{strategy="suffix",{labels}}} {drafts}',
                "# TYPE ray_outrider_kv_cache_usage_ratio gauge",
                f"ray_outrider_kv_cache_usage_ratio{{{labels}}} {used}",
                "# TYPE ray_outrider_request_queue_time_seconds histogram",
                f'ray_outrider_request_queue_time_seconds_bucket{{le="+Inf",{labels}}} {drafts}',
                f"ray_outrider_request_queue_time_seconds_count{{{labels}}} {drafts}",
                f"ray_outrider_request_queue_time_seconds_sum{{{labels}}} 0.5",
                "# TYPE ray_node_cpu_count gauge",
                f"ray_node_cpu_count{{{labels}}} 2",
                "",
            ]
        )

    families = list(added_up([said("a", 2, 0.5), said("b", 3, 0.25)]))
    text = written([*families, *by_vllm_names(families, "tiny")]).decode()
    assert 'outrider_spec_decode_num_drafts_total{strategy="suffix"} 5.0' in text
    assert "outrider_kv_cache_usage_ratio 0.375" in text and "node_cpu" not in text
    assert 'outrider_request_queue_time_seconds_bucket{le="+Inf"} 5.0' in text
    assert 'vllm:spec_decode_num_drafts_total{engine="0",model_name="tiny"} 5.0' in text
    assert 'vllm:request_queue_time_seconds_sum{engine="0",model_name="tiny"} 1.0' in text
