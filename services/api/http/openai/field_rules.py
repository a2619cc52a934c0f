"""Fields of OpenAI's, vLLM's and llama-server's APIs that are not honoured here, as they are declared: their harmless values
are taken, all others refused. And what to say instead of fields that are not declared."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from services.api.http.openai.errors import shown
from services.api.http.openai.fields import Fields
from services.api.http.openai.protocol.marks import declared_fields, effect_of

_TYPES = ConfigDict(strict=True)

SAMPLERS = "each sampler that a request sets is applied, in one order"
# What to say instead of fields of vLLM's, SGLang's, TensorRT-LLM's, llama-server's and Ollama's.
_INSTEAD: dict[str, tuple[str, ...]] = {
    "say max_tokens": ("n_predict", "max_new_tokens", "num_predict", "t_max_predict_ms", "t_max_prompt_ms"),
    "say min_tokens": ("min_new_tokens",),
    "say logprobs": ("n_probs", "return_logprob", "top_logprobs_num", "post_sampling_probs", "logprob_token_ids"),
    "say repetition_penalty": (
        "repeat_penalty", "penalty_last_n", "repeat_last_n", "dry_multiplier", "dry_base", "dry_allowed_length",
        "dry_penalty_last_n", "dry_sequence_breakers",
    ),
    "say temperature, top_p or min_p": (
        "mirostat", "mirostat_eta", "mirostat_tau", "tfs_z", "top_n_sigma", "top_p_min", "xtc_probability", "xtc_threshold",
        "dynatemp_range", "dynatemp_exponent", "min_keep",
    ),
    "the model's generation_config may set it": ("typical_p",),
    "say seed": ("sampling_seed", "random_seed"),
    "say stop": ("stop_sequences", "stop_regex"),
    "say include_stop_str_in_output": ("no_stop_trim",),
    "say logit_bias": ("embedding_bias",),
    "say structured_outputs": ("guided_whitespace_pattern", "structural_tag"),
    "say structured_outputs.regex": ("regex",),
    "say structured_outputs.grammar": ("grammar",),
    "say structured_outputs.grammar, as Lark writes it": ("ebnf",),
    "say response_format or structured_outputs.json": ("json_schema",),
    "say include_reasoning": ("separate_reasoning", "stream_reasoning"),
    "the server decides (server.reasoning)": ("reasoning_format",),
    "say reasoning_effort or chat_template_kwargs": ("think", "thinking", "enable_thinking", "reasoning"),
    "say request_id": ("rid",),
    "say thinking_token_budget": ("thinking_budget",),
    "say return_token_ids": ("return_prompt_token_ids", "return_tokens"),
    "POST /v1/chat/completions/render shows what is asked of the model": ("return_prompt_text", "return_token_offsets"),
    "name the adapter as the model": ("lora", "lora_path", "lora_request"),
    "send token ids as prompt to /v1/completions": ("input_ids",),
    "say cache_salt": ("extra_key",),
    "prompts are cached for each API key by themselves, as long as there is room": (
        "id_slot", "n_keep", "n_discard", "session_id", "session_params",
    ),
    "caches are not moved between servers": (
        "bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank", "disaggregated_params",
        "ec_transfer_params",
    ),
    "the model reads text alone": (
        "images_config", "max_dynamic_patch", "media_io_kwargs", "min_dynamic_patch", "return_mm_kwargs",
        "use_audio_in_video",
    ),
    "answers are decoded without beams": ("early_stopping",),
    "answers are not marked": ("watermarking",),
    "metrics have no labels of requests": ("custom_labels",),
    "the router chooses a verifier": ("data_parallel_rank", "routed_dp_rank"),
    "programs are not taken from requests": ("custom_logit_processor", "custom_params"),
    "states do not leave the server": (
        "return_context_logits", "return_generation_logits", "return_hidden_states", "return_routed_experts",
        "routed_experts_prompt_start", "routed_experts_start_len",
    ),
    "usage.prompt_tokens_details has them": ("return_cached_tokens_details",),
    "metrics of every answer have it": ("return_meta_info", "return_spec_tokens_details"),
    "say stream_options.continuous_usage_stats": ("timings_per_token", "return_progress"),
    "answers are given whole": ("response_fields",),
    SAMPLERS: ("samplers",),
    "say speculation": ("speculative", "speculative.n_max", "speculative.n_min", "speculative.p_min"),
    "say speculation.strategy": ("strategy",),
    "the index is the server's (retrieval.index)": ("ngram_corpus_id",),
    "the model's context is the server's (verifier.max_model_len)": ("num_ctx",),
    "the model stays loaded": ("keep_alive",),
    "say each of its values as a field": ("options", "sampling_params", "extra_body"),
}  # fmt: skip
HINTS: dict[str, str] = {name: f"unset: {instead}" for instead, names in _INSTEAD.items() for name in names}
# Of /v1/completions, whose answers have no thoughts.
OF_COMPLETIONS: dict[str, str] = {
    **HINTS,
    **dict.fromkeys(
        ("think", "thinking", "enable_thinking", "reasoning", "separate_reasoning", "stream_reasoning", "thinking_budget"),
        "unset: say it to /v1/chat/completions",
    ),
}


def take_unhonoured(fields: Fields, body: type[BaseModel]) -> dict[str, Any]:
    """Take the fields that ask for nothing; gives those that are set.

    Raises:
        Refused: one asks for something; says what is allowed.
    """
    taken = {}
    for key, (harmless, allowed) in _unhonoured(body).items():
        value = fields.take(key)
        if value is not None and not _is(harmless, value):
            raise fields.refuse(key, shown(value), allowed, "unsupported_parameter")
        if value is not None:
            taken[key] = value
    return taken


@cache
def _unhonoured(body: type[BaseModel]) -> dict[str, tuple[TypeAdapter[Any] | None, str]]:
    """For each such field, its harmless values, if it has any, and what is said of all others."""
    return {
        name: (_harmless(field), field.description or "unset")
        for name, field in declared_fields(body)
        if effect_of(field) != "honoured"
    }


def _harmless(field: FieldInfo) -> TypeAdapter[Any] | None:
    if effect_of(field) == "refused":
        return None
    kind: Any = Annotated[field.annotation, *field.metadata]
    return TypeAdapter(kind, config=_TYPES)


def _is(kind: TypeAdapter[Any] | None, value: Any) -> bool:
    if kind is None:
        return False
    try:
        kind.validate_python(value)
    except ValidationError:
        return False
    return True
