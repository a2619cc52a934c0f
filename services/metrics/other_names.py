"""Our numbers again by other servers' names, where both mean the same, for dashboards and clients that know those.

``vllm bench serve`` reads the counters of drafts before and after a run, and prints the acceptance
(https://docs.vllm.ai/en/stable/design/metrics/). SGLang's names are those of its ``metrics_collector.py``, TensorRT-LLM's
those of ``tensorrt_llm/metrics/collector.py``, llama-server's those of its README, all as of November 2026.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client.metrics_core import Metric

from services.metrics.families import FAMILIES, PREFIX, OtherServer

# What their names begin with, and the labels that all of their numbers have; MODEL stands for the served one's name.
_MODEL = "MODEL"
_SHAPES: Mapping[OtherServer, tuple[str, Mapping[str, str]]] = {
    "vllm": ("vllm:", {"model_name": _MODEL, "engine": "0"}),
    "sglang": ("sglang:", {"model_name": _MODEL, "engine_type": "unified"}),
    "tensorrt_llm": ("trtllm_", {"model_name": _MODEL, "engine_type": "trtllm"}),
    "llama_cpp": ("llamacpp:", {}),
}
# By our names, theirs in the order of OtherServer. "=": the same; empty: it has none that means the same.
TABLE: Mapping[str, tuple[str, str, str, str]] = {
    "num_requests_running": ("=", "num_running_reqs", "=", "requests_processing"),
    "num_requests_waiting": ("=", "num_queue_reqs", "=", "requests_deferred"),
    "kv_cache_usage_ratio": ("kv_cache_usage_perc", "token_usage", "kv_cache_utilization", ""),
    "prompt_tokens_total": ("=", "=", "=", ""),
    "generation_tokens_total": ("=", "=", "=", "tokens_predicted_total"),
    "requests_total": ("request_success_total", "num_requests_total", "request_success_total", ""),
    "prefix_cache_queries_total": ("=", "", "", ""),
    "prefix_cache_hits_total": ("=", "cached_tokens_total", "prompt_cached_tokens_total", ""),
    "preemptions_total": ("num_preemptions_total", "num_retracted_requests_total", "", ""),
    "iteration_tokens": ("iteration_tokens_total", "", "", ""),
    "time_to_first_token_seconds": ("=", "=", "=", ""),
    "inter_token_latency_seconds": ("=", "", "", ""),
    "request_time_per_output_token_seconds": ("=", "", "time_per_output_token_seconds", ""),
    "e2e_request_latency_seconds": ("=", "=", "=", ""),
    "request_queue_time_seconds": ("=", "queue_time_seconds", "=", ""),
    "request_prefill_time_seconds": ("=", "", "=", ""),
    "request_decode_time_seconds": ("=", "", "=", ""),
    "request_inference_time_seconds": ("=", "", "=", ""),
    "request_prompt_tokens": ("=", "prompt_tokens_histogram", "", ""),
    "request_generation_tokens": ("=", "generation_tokens_histogram", "", ""),
    "request_params_max_tokens": ("=", "", "", ""),
    "spec_decode_num_drafts_total": ("=", "", "", "="),
    "spec_decode_num_draft_tokens_total": ("=", "", "=", "="),
    "spec_decode_num_accepted_tokens_total": ("=", "", "=", "="),
    "spec_decode_num_accepted_tokens_per_pos_total": ("=", "", "spec_decode_accepted_tokens_total", "="),
    "spec_decode_num_passes_total": ("", "spec_verify_calls_total", "", ""),
}


@dataclass(frozen=True, slots=True)
class CounterRatio:
    """A gauge that is one of our counters by another, since the start: theirs are of late.

    Attributes:
        plus: is added to it.
    """

    of: str
    by: str
    plus: float = 0.0


# Gauges that we have no number for, by server and name.
RATIOS: Mapping[OtherServer, Mapping[str, CounterRatio]] = {
    "sglang": {
        "cache_hit_rate": CounterRatio("prefix_cache_hits_total", "prefix_cache_queries_total"),
        "spec_accept_length": CounterRatio("spec_decode_num_emitted_tokens_total", "spec_decode_num_passes_total"),
        "spec_accept_rate": CounterRatio("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"),
    },
    "tensorrt_llm": {
        "kv_cache_hit_rate": CounterRatio("prefix_cache_hits_total", "prefix_cache_queries_total"),
        # Of passes with drafts alone, as theirs is.
        "spec_decode_acceptance_length": CounterRatio(
            "spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total", plus=1.0
        ),
    },
}


@dataclass(frozen=True, slots=True)
class _Label:
    """What becomes of one of our labels. Over all others there is one number.

    Attributes:
        name: theirs; empty: it is added up over.
        values: theirs, by ours; what has none here is left out. Empty: all are kept as they are.
    """

    name: str
    values: Mapping[str, str] = field(default_factory=dict)


_BOUND = {"le": _Label("le")}
_POSITION = {"position": _Label("position")}
_LABELS: Mapping[OtherServer, Mapping[str, _Label]] = {
    "vllm": {
        **_BOUND,
        **_POSITION,
        "outcome": _Label("finished_reason", {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}),
    },
    "sglang": {**_BOUND, "outcome": _Label("", {"stop": "", "length": ""})},
    "tensorrt_llm": {
        **_BOUND,
        "position": _Label("token_position"),
        "outcome": _Label("finished_reason", {"stop": "stop", "length": "length", "cancelled": "cancelled"}),
    },
    "llama_cpp": {**_BOUND, **_POSITION},
}


def name_at(server: OtherServer, ours: str) -> str:
    """What a server calls a number of ours, without its prefix; empty: it has none that means the same."""
    theirs = TABLE[ours][get_args(OtherServer).index(server)]
    return ours if theirs == "=" else theirs


def by_names_of(servers: Iterable[OtherServer], families: Iterable[Metric], model: str) -> Iterator[Metric]:
    """The families that other servers have as well, by their names.

    Args:
        model: the served model's name.
    """
    found = {
        family.name.removeprefix(PREFIX) + ("_total" if family.type == "counter" else ""): family for family in families
    }
    # A family that is told twice is none that Prometheus takes.
    for server in dict.fromkeys(servers):
        prefix, labels = _SHAPES[server]
        every = {name: model if value == _MODEL else value for name, value in labels.items()}
        for ours, family in found.items():
            if ours in TABLE and (theirs := name_at(server, ours)):
                yield _renamed(family, ours, prefix + theirs, _LABELS[server], every)
        for theirs, ratio in RATIOS.get(server, {}).items():
            below = _sum(found.get(ratio.by))
            told = Metric(prefix + theirs, f"{ratio.of} by {ratio.by}, since the start", "gauge")
            told.add_sample(told.name, every, ratio.plus + _sum(found.get(ratio.of)) / below if below else 0.0)
            yield told


def _sum(family: Metric | None) -> float:
    return 0.0 if family is None else sum(sample.value for sample in family.samples if sample.name.endswith("_total"))


def _renamed(family: Metric, ours: str, theirs: str, labels: Mapping[str, _Label], every: Mapping[str, str]) -> Metric:
    counter = "_total" if family.type == "counter" else ""
    told = Metric(theirs.removesuffix(counter), family.documentation, family.type)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    if counter and not any(label in labels and labels[label].name for label in FAMILIES[ours].labels):
        # A counter is read before a run, too, when there may be nothing to count yet.
        sums["_total", ()] = 0.0
    for sample in family.samples:
        if (kept := _kept(sample.labels, labels)) is not None:
            key = (sample.name.removeprefix(family.name), kept)
            sums[key] = sums.get(key, 0.0) + sample.value
    for (ending, own), value in sums.items():
        told.add_sample(told.name + ending, {**every, **dict(own)}, value)
    return told


def _kept(given: Mapping[str, str], labels: Mapping[str, _Label]) -> tuple[tuple[str, str], ...] | None:
    """A series' labels by their names; None: they have no such series."""
    kept: list[tuple[str, str]] = []
    for name, value in given.items():
        if (label := labels.get(name)) is None:
            continue
        if label.values and value not in label.values:
            return None
        if label.name:
            kept.append((label.name, label.values.get(value, value)))
    return tuple(kept)
