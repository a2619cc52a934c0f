"""Numbers by other servers' names: one series of each, there before anything is counted, and read as their clients read them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

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
from services.metrics.families import FAMILIES, OtherServer
from services.metrics.other_names import RATIOS, TABLE, by_names_of, name_at
from services.metrics.prometheus_sink import PrometheusSink, written
from tests.servers.scripted_router import ScriptedRouter


def values(text: bytes) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, sample.labels.get("position", "")): sample.value for family in families for sample in family.samples
    }


def told(sink: PrometheusSink, server: OtherServer = "vllm") -> bytes:
    return written(by_names_of([server], sink.collect(), "tiny"))


def test_strategies_are_added_up_and_positions_are_kept() -> None:
    sink = PrometheusSink()
    for name in TABLE:
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


@pytest.mark.parametrize("server", get_args(OtherServer))
def test_each_name_is_of_one_number(server: OtherServer) -> None:
    ratios = RATIOS.get(server, {})
    assert {*TABLE, *(name for ratio in ratios.values() for name in (ratio.of, ratio.by))} <= {*FAMILIES}
    names = [*filter(None, (name_at(server, ours) for ours in TABLE)), *ratios]
    assert len({*names}) == len(names)
    sink = PrometheusSink()
    for name in TABLE:
        {"counter": sink.counter, "gauge": sink.gauge, "histogram": sink.histogram}[FAMILIES[name].kind](name)
    text = told(sink, server).decode()
    assert written(by_names_of([server, server], sink.collect(), "tiny")) == text.encode()
    typed = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert sorted(re.split("[:_]", name, maxsplit=1)[1] for name in typed) == sorted(names)


def test_sglang_tensorrt_llm_and_llama_server_are_told_in_their_words() -> None:
    sink = PrometheusSink()
    sink.gauge("num_requests_waiting").set(3)
    for outcome, count in (("stop", 5), ("length", 2), ("cancelled", 4), ("refused", 9), ("error", 1)):
        sink.counter("requests_total").add(count, outcome, "OK")
    for strategy, passes in (("suffix", 4), ("autoregressive", 6)):
        sink.counter("spec_decode_num_passes_total").add(passes, strategy)
        sink.counter("spec_decode_num_emitted_tokens_total").add(2 * passes, strategy)
    sink.counter("spec_decode_num_drafts_total").add(4, "suffix")
    sink.counter("spec_decode_num_accepted_tokens_total").add(10, "suffix")
    sink.counter("spec_decode_num_draft_tokens_total").add(40, "suffix")
    sink.counter("spec_decode_num_accepted_tokens_per_pos_total").add(3, "suffix", "1")
    sglang = told(sink, "sglang").decode()
    own = '{engine_type="unified",model_name="tiny"}'
    for name, value in (
        ("num_queue_reqs", 3.0), ("num_requests_total", 7.0), ("spec_accept_length", 2.0), ("spec_accept_rate", 0.25),
        ("spec_verify_calls_total", 10.0), ("cache_hit_rate", 0.0),
    ):  # fmt: skip
        assert f"sglang:{name}{own} {value}\n" in sglang
    trtllm = told(sink, "tensorrt_llm").decode()
    assert 'trtllm_spec_decode_acceptance_length{engine_type="trtllm",model_name="tiny"} 3.5\n' in trtllm
    assert (
        'trtllm_spec_decode_accepted_tokens_total{engine_type="trtllm",model_name="tiny",token_position="1"} 3.0' in trtllm
    )
    assert 'trtllm_request_success_total{engine_type="trtllm",finished_reason="cancelled",model_name="tiny"} 4.0' in trtllm
    assert '"refused"' not in trtllm
    assert "llamacpp:requests_deferred 3.0\n" in told(sink, "llama_cpp").decode()
    reasons = {"stop": 5, "length": 2, "abort": 4, "error": 1}
    found = [*text_string_to_metric_families(told(sink).decode())]
    (ended,) = [family for family in found if family.name == "vllm:request_success"]
    assert {sample.labels["finished_reason"]: sample.value for sample in ended.samples} == reasons


def test_the_page_has_the_whole_table() -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/metrics.md").read_text()
    for ours in TABLE:
        names = [name_at(server, ours) for server in get_args(OtherServer)]
        assert f"| `{ours}` | {' | '.join(f'`{name}`' if name else '' for name in names)} |" in page
    for server, ratios in RATIOS.items():
        assert all(f"`{name}`" in page for name in ratios), server


def test_a_setting_adds_them() -> None:
    for wanted in (False, True):
        observing = Observing(
            load(flags=[f"metrics.names_of={'[sglang, vllm]' if wanted else '[]'}"], environ={}), on_ray=False
        )
        observing.router(ScriptedRouter(), "tiny")
        for begins in (b"vllm:prompt_tokens_total{", b"sglang:prompt_tokens_total{"):
            assert (begins in observing.exposition()) is wanted
        assert b"trtllm" not in observing.exposition()
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
    text = written([*families, *by_names_of(["vllm"], families, "tiny")]).decode()
    assert 'outrider_spec_decode_num_drafts_total{strategy="suffix"} 5.0' in text
    assert "outrider_kv_cache_usage_ratio 0.375" in text and "node_cpu" not in text
    assert 'outrider_request_queue_time_seconds_bucket{le="+Inf"} 5.0' in text
    assert 'vllm:spec_decode_num_drafts_total{engine="0",model_name="tiny"} 5.0' in text
    assert 'vllm:request_queue_time_seconds_sum{engine="0",model_name="tiny"} 1.0' in text
