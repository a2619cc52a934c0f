"""Our numbers again by vLLM's names, where both mean the same, for dashboards and clients that know those.

``vllm bench serve`` reads the counters of drafts before and after a run, and prints the acceptance
(https://docs.vllm.ai/en/stable/design/metrics/).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric

from services.metrics.families import FAMILIES, PREFIX

_PREFIX = "vllm:"
# By our names, those of vLLM's that are others.
_OTHERWISE = {
    "kv_cache_usage_ratio": "kv_cache_usage_perc",
    "preemptions_total": "num_preemptions_total",
    "iteration_tokens": "iteration_tokens_total",
}
_SAME = (
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_max_tokens",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
)
NAMES: dict[str, str] = {**{name: name for name in _SAME}, **_OTHERWISE}
# Labels that vLLM has as well. Over all others it has one number.
_KEPT = ("le", "position")


def by_vllm_names(families: Iterable[Metric], model: str) -> Iterator[Metric]:
    """The families that vLLM has as well, by its names.

    Args:
        model: the served model's name.
    """
    labels = {"model_name": model, "engine": "0"}
    for family in families:
        ending = "_total" if family.type == "counter" else ""
        ours = family.name.removeprefix(PREFIX) + ending
        if ours in NAMES:
            yield _named(family, NAMES[ours].removesuffix(ending), labels)


def _named(family: Metric, name: str, model: dict[str, str]) -> Metric:
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    if family.type == "counter" and not {*_KEPT} & {*FAMILIES[family.name.removeprefix(PREFIX) + "_total"].labels}:
        # A counter is read before a run, too, when there may be nothing to count yet.
        sums["_total", ()] = 0.0
    for sample in family.samples:
        kept = tuple((label, value) for label, value in sample.labels.items() if label in _KEPT)
        key = (sample.name.removeprefix(family.name), kept)
        sums[key] = sums.get(key, 0.0) + sample.value
    told = Metric(_PREFIX + name, family.documentation, family.type)
    for (ending, labels), value in sums.items():
        told.add_sample(_PREFIX + name + ending, {**model, **dict(labels)}, value)
    return told
