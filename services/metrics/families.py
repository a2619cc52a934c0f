"""Every metric of the service: its name, kind, labels and meaning. Each is counted by the one component that is named here.

Names are vLLM's where it has the quantity, with the prefix ``outrider_``, which sinks add. No label ever names a tenant, a
key or a request: what has labels has few values of each. (Names of rules are the operator's.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "outrider_"

# Upper bounds of buckets, in seconds: of a whole answer; a gap between two pieces of an answer; a part of a step.
_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
_PART_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_TOKENS = (1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 32768.0, 131072.0)
_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 8192.0)
# The first bucket holds zero alone.
_NODES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)

Kind = Literal["counter", "gauge", "histogram"]
# Whose names /metrics may have besides (services/metrics/other_names.py).
OtherServer = Literal["vllm", "sglang", "tensorrt_llm", "llama_cpp"]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric.

    Attributes:
        name: without the prefix; counters end in ``_total``, times are in seconds.
        labels: the names of its labels, in the order in which their values are given.
        buckets: of a histogram, the upper bounds, ascending and above zero; the infinite one is added.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(name: str, help_: str, *labels: str) -> Family:
    return Family(name, "counter", help_, labels)


def _gauge(name: str, help_: str, *labels: str) -> Family:
    return Family(name, "gauge", help_, labels)


def _histogram(name: str, buckets: tuple[float, ...], help_: str, *labels: str) -> Family:
    return Family(name, "histogram", help_, labels, buckets)


_ROUTER = (
    _counter(
        "requests_total",
        "Requests that ended, by outcome (stop, length, cancelled, refused, error) and gRPC status.",
        "outcome",
        "code",
    ),
    _gauge("num_requests_open", "Requests that the router is answering."),
    _counter("prompt_tokens_total", "Tokens of the prompts of answered requests."),
    _counter("generation_tokens_total", "Tokens that were sent to users."),
    _counter(
        "migrations_total",
        "Requests whose verifier was lost in mid-answer, by whether another one went on (continued, given_up).",
        "result",
    ),
    _counter(
        "auth_failures_total",
        "Calls refused because they brought no valid API key, by why (no_key, unknown_key, expired_key).",
        "reason",
    ),
    _counter("rate_limited_total", "Requests refused because a limit of their API key was reached, by limit.", "limit"),
    _counter(
        "router_rules_matched_total", "Planned requests by the rule that chose how they are drafted; none: none did.", "rule"
    ),
    _counter(
        "router_learning_choices_total",
        "Requests whose strategy the router chose by what it has learnt, by strategy.",
        "strategy",
    ),
    _counter(
        "router_learning_exchanges_total",
        "Exchanges of what routers have learnt through Redis, by how they ended (ok, failed).",
        "outcome",
    ),
    _counter("router_learning_damaged_total", "Sheets of learnt costs in Redis that were damaged, and written anew."),
    _counter(
        "router_learning_replays_total",
        "Answers that the router had replayed to learn from, by whether that told something (learnt, unknown).",
        "outcome",
    ),
    _counter(
        "router_rules_reloads_total", "Changes of router.rules_file, by how reading it ended (ok, refused).", "outcome"
    ),
    _histogram("time_to_first_token_seconds", _LATENCY_S, "From a request's arrival to its first token."),
    _histogram(
        "inter_token_latency_seconds",
        _GAP_S,
        "Between one piece of an answer and the next; a piece may hold several tokens.",
    ),
    _histogram(
        "request_time_per_output_token_seconds", _GAP_S, "Of one request, seconds after its first token by tokens after it."
    ),
    _histogram("e2e_request_latency_seconds", _LATENCY_S, "From a request's arrival to the end of its answer."),
    _histogram("request_queue_time_seconds", _LATENCY_S, "That a request waited at the verifier before its first pass."),
    _histogram("request_prefill_time_seconds", _LATENCY_S, "From a request's first pass to its first token."),
    _histogram("request_decode_time_seconds", _LATENCY_S, "From a request's first token to the end of its answer."),
    _histogram("request_inference_time_seconds", _LATENCY_S, "From a request's first pass to the end of its answer."),
    _histogram("request_prompt_tokens", _TOKENS, "Tokens of a request's prompt."),
    _histogram("request_generation_tokens", _TOKENS, "Tokens of an answer."),
    _histogram(
        "request_params_max_tokens", _TOKENS, "What requests say as max_tokens; those that leave it open are left out."
    ),
    _gauge("certificate_expiry_timestamp_seconds", "When the public server's TLS certificate ends, in seconds since 1970."),
    _gauge("ready", "1 while requests would be answered, else 0."),
)

_VERIFIER = (
    _gauge("num_requests_running", "Requests being decoded."),
    _gauge("num_requests_waiting", "Requests waiting to be decoded."),
    _gauge("kv_cache_usage_ratio", "Share of the key-value cache that requests use; prefixes kept for later are free."),
    _gauge(
        "arithmetic_info",
        "1 for the arithmetic of a verifier: a hash that differs where weights, dtype or kernels could give other tokens.",
        "arithmetic",
    ),
    _counter("prefix_cache_queries_total", "Tokens of admitted requests that the prefix cache was asked for."),
    _counter("prefix_cache_hits_total", "Those of them that it had."),
    _counter("preemptions_total", "Requests that were preempted because the key-value cache was full."),
    _histogram("step_seconds", _PART_S, "Of one pass over the target, by its kind (decode, prompt, mixed).", "kind"),
    _histogram("step_rows", _ROWS, "Rows of one pass: tokens of prompts, pending tokens and drafted ones."),
    _histogram("iteration_tokens", _ROWS, "Tokens that one pass got done: those of prompts, and those of answers."),
    _histogram("budget_nodes", _NODES, "Drafted tokens that one pass checked."),
    _histogram("draft_wait_seconds", _PART_S, "That one step waited for drafts."),
    _counter("draft_deadline_misses_total", "Waits for drafts that ended at their deadline with a draft still missing."),
    _counter("drafts_missed_total", "Steps of a request without a draft although drafting would have paid."),
    _counter("drafts_late_total", "Drafts that came after their pass had begun."),
    _counter("drafts_malformed_total", "Drafts dropped because their tree was invalid."),
    _counter("spec_decode_num_passes_total", "Passes of a request that brought tokens, with drafts or without.", "strategy"),
    _counter("spec_decode_num_emitted_tokens_total", "Tokens of answers that they brought.", "strategy"),
    _counter("spec_decode_num_drafts_total", "Passes of a request with drafted tokens.", "strategy"),
    _counter("spec_decode_num_draft_tokens_total", "Drafted tokens that were checked.", "strategy"),
    _counter("spec_decode_num_accepted_tokens_total", "Drafted tokens that were accepted.", "strategy"),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "Drafts of which the token at this position was accepted, from 0; positions from 32 on are left out.",
        "strategy",
        "position",
    ),
    _gauge(
        "spec_decode_seconds_saved",
        "Sum over answers of the seconds by which they came sooner than by plain decoding in the same company since the "
        "start, less those by which they came later, by how many requests got tokens in the step (1, 2-3, 4-7, ...).",
        "strategy",
        "requests",
    ),
    _counter("drafted_by_source_total", "Drafted tokens that were checked, by the source that proposed them.", "source"),
    _counter("accepted_by_source_total", "Drafted tokens that were accepted, by the source that proposed them.", "source"),
    _counter(
        "auto_choices_total",
        "Decisions whether a costly source drafts for a request, by source and why (pays, trial, too_costly, given_up).",
        "source",
        "reason",
    ),
    _histogram("grammar_mask_seconds", _PART_S, "That grammars took in one step that had one: masks, and drafts."),
    _counter("lossless_checks_total", "Answers that were decoded a second time, plainly, and compared."),
    _counter("lossless_check_failures_total", "Those of them that differed from what had been answered."),
)

_DRAFTER = (
    _counter("drafter_drafts_total", "Drafts that a drafter made, by group of sources.", "group"),
    _counter("drafter_failures_total", "Steps for which a drafter could not draft."),
    _counter("drafter_nodes_total", "Tokens that a drafter proposed, by source.", "source"),
    _histogram("drafter_draft_seconds", _PART_S, "From a step's report to a draft for it, at the drafter.", "group"),
    _gauge("drafter_sessions", "Requests that a drafter keeps the text of."),
    _counter("drafter_retrievals_missed_total", "Look-ups that a drafter went on without: too late, or failed."),
    _counter(
        "drafter_answers_total",
        "Answers that drafters share, by what became of them: kept in the store, recalled from it by another drafter, or "
        "lost (the store was not there, or the tenant had been forgotten).",
        "outcome",
    ),
)

_RETRIEVAL = (
    _counter(
        "retrieval_lookups_total", "Queries that were answered, by whether the index held anything (hit, miss).", "result"
    ),
    _histogram("retrieval_lookup_seconds", _PART_S, "Of one batch of queries, at the index."),
    _counter("retrieval_failures_total", "Batches of queries that failed, such as while no index is loaded."),
    _gauge("index_info", "1 for the version of the index in use.", "version"),
    _counter("index_switches_total", "New versions of the index that came into use."),
)

_COMPONENTS = (
    _counter(
        "component_auth_failures_total",
        "Calls between components that were refused, by the component that refused them (verifier, drafter, retrieval) and "
        "why (no_token, unknown_token, wrong_certificate).",
        "component",
        "reason",
    ),
    _gauge(
        "component_certificate_expiry_timestamp_seconds",
        "When the certificate ends that a component shows to others (cluster.tls), in seconds since 1970.",
        "component",
    ),
)

FAMILIES: dict[str, Family] = {
    family.name: family for family in (*_ROUTER, *_VERIFIER, *_DRAFTER, *_RETRIEVAL, *_COMPONENTS)
}


def family_of(name: str, kind: Kind) -> Family:
    """The family ``name``.

    Raises:
        KeyError: there is none, or it is of another kind: a mistake in our code.
    """
    family = FAMILIES.get(name)
    if family is None or family.kind != kind:
        raise KeyError(f"{name} is no {kind} of services/metrics/families.py")
    return family
