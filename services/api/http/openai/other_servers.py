"""Fields of other servers that a body has: which of them ask for nothing, and which are left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from services.api.http.openai.errors import Refused
from services.api.http.openai.fields import Fields

_Nothing = Callable[[Any], bool]


def _any(_: Any) -> bool:
    return True


def _empty(value: Any) -> bool:
    return value is False or (isinstance(value, str | list | dict) and not value)


def _true(value: Any) -> bool:
    return value is True


def _number(*values: float) -> _Nothing:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value in values


# What of those fields asks for nothing, as clients send them that send everything. Where any value does, the field only says
# more of another one, or of what is done anyway.
ASKS_FOR_NOTHING: dict[str, _Nothing] = {
    **dict.fromkeys(
        (
            "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent", "id_slot",
            "mirostat_eta", "mirostat_tau", "n_discard", "n_keep", "xtc_threshold",
        ),
        _any,
    ),
    **dict.fromkeys(
        (
            "custom_labels", "custom_params", "early_stopping", "ec_transfer_params", "extra_body", "grammar",
            "images_config", "lora", "media_io_kwargs", "no_stop_trim", "options", "post_sampling_probs", "response_fields",
            "return_cached_tokens_details", "return_context_logits", "return_generation_logits", "return_hidden_states",
            "return_logprob", "return_meta_info", "return_progress", "return_prompt_text", "return_prompt_token_ids",
            "return_routed_experts", "return_spec_tokens_details", "return_token_offsets", "return_tokens", "samplers",
            "sampling_params", "session_params", "stop_regex", "stop_sequences", "timings_per_token", "use_audio_in_video",
            "watermarking",
        ),
        _empty,
    ),
    **dict.fromkeys(("return_mm_kwargs", "separate_reasoning", "stream_reasoning"), _true),
    **dict.fromkeys(("n_predict", "num_predict"), _number(-1)),
    **dict.fromkeys(("t_max_predict_ms", "t_max_prompt_ms"), _number(-1, 0)),
    "tfs_z": _number(1),
    **dict.fromkeys(
        (
            "dry_multiplier", "dynatemp_range", "min_keep", "min_new_tokens", "mirostat", "n_probs",
            "routed_experts_prompt_start", "routed_experts_start_len", "top_logprobs_num", "top_p_min", "xtc_probability",
        ),
        _number(0),
    ),
    "top_n_sigma": _number(-1, 0),
    "reasoning_format": lambda value: value == "auto",
}  # fmt: skip
# Of how many tokens penalties count, which says something where there are some: here they count all, which is their -1.
_OF_PENALTIES = ("penalty_last_n", "repeat_last_n")
_ALL = _number(-1)
_PENALTIES = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
# What is left out, and named, where nothing says otherwise (server.unknown_fields). A model's generation config may have a
# typical_p, which this one would turn off.
_LEFT_OUT: dict[str, _Nothing] = {"samplers": _any, "typical_p": _number(1)}
# Values that say the same by another name.
_SAME: dict[str, tuple[str, _Nothing]] = {"repeat_penalty": ("repetition_penalty", _number(1))}


def in_own_names(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without other servers' names, where they say the same as ours and ours are unset."""
    found = dict(body)
    for name, (ours, same) in _SAME.items():
        if same(found.get(name)) and found.get(ours) is None:
            found[ours] = found.pop(name)
    return found


def asks_for_nothing(name: str, value: Any, body: Mapping[str, Any]) -> bool:
    """Whether a field of another server asks for nothing in a body."""
    if value is None:
        return True
    if name in _OF_PENALTIES:
        return _ALL(value) or (_sets_no_penalty(body) and not _leaves_penalty(body))
    return name in ASKS_FOR_NOTHING and ASKS_FOR_NOTHING[name](value)


def counts_left_out(body: Mapping[str, Any]) -> dict[str, Any]:
    """Of how many tokens penalties are to count, where only the model's generation config may have one."""
    found = {name: value for name in _OF_PENALTIES if type(value := body.get(name)) is int and not _ALL(value)}
    return found if _sets_no_penalty(body) and _leaves_penalty(body) else {}


def _sets_no_penalty(body: Mapping[str, Any]) -> bool:
    return all(body.get(name) in (None, harmless) for name, harmless in _PENALTIES.items())


def _leaves_penalty(body: Mapping[str, Any]) -> bool:
    """Whether a model's generation config may have a penalty, which stays."""
    said = in_own_names(body)
    return said.get("repetition_penalty") is None and not said.get("ignore_generation_config")


def told_of(name: str) -> str:
    """What becomes of a field of another server, in words."""
    if name in _LEFT_OUT:
        return "left out" if _LEFT_OUT[name] is _any else "1 is left out"
    if name in _SAME:
        return f"1 is {_SAME[name][0]}"
    if ASKS_FOR_NOTHING.get(name) is _any:
        return "without effect"
    if name in _OF_PENALTIES:
        return "left out where no penalty is set"
    return "only harmless" if name in ASKS_FOR_NOTHING else "refused"


def end(fields: Fields, hints: Mapping[str, str], body: Mapping[str, Any]) -> tuple[Refused, ...]:
    """Refuse what is left of a body, but for what asks for nothing; gives what may be left out.

    Args:
        hints: for fields of other servers, what to say instead.

    Raises:
        Refused: a field is left.
    """
    left_out, counts = [], counts_left_out(body)
    for name in filter(fields.given, hints):
        value = fields.take(name)
        if asks_for_nothing(name, value, body):
            continue
        shown = value if isinstance(value, str | int | float) and value != "" else "set"
        refused = fields.refuse(name, shown, hints[name], "unknown_parameter")
        if name not in counts and (name not in _LEFT_OUT or not _LEFT_OUT[name](value)):
            raise refused
        left_out.append(refused)
    fields.end()
    return tuple(left_out)
