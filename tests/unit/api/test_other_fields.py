"""What other servers' clients send by themselves asks for nothing and changes nothing; what asks for something is refused."""

from __future__ import annotations

from typing import Any

import pytest

from services.api.http.openai import field_rules
from services.api.http.openai.chat_request import read_chat
from services.api.http.openai.completion_request import read_completion
from services.api.http.responses.chat_body import read_create
from speculation.errors import InvalidArgument

FOX: dict[str, Any] = {"messages": [{"role": "user", "content": "fox"}]}
# Bodies as clients send them whose users have chosen nothing.
SENT: dict[str, dict[str, Any]] = {
    "llama-server's page": {
        "dynatemp_range": 0, "dynatemp_exponent": 1, "xtc_probability": 0, "xtc_threshold": 0.1, "repeat_last_n": -1,
        "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "n_predict": -1, "n_probs": 0,
        "reasoning_format": "auto", "id_slot": 0, "n_keep": 0, "samplers": [], "timings_per_token": False, "mirostat": 0,
        "mirostat_tau": 5.0, "mirostat_eta": 0.1, "top_n_sigma": -1, "min_keep": 0, "grammar": "", "lora": [],
    },
    "sglang's defaults": {
        "no_stop_trim": False, "separate_reasoning": True, "stream_reasoning": True, "return_hidden_states": False,
        "return_routed_experts": False, "routed_experts_start_len": 0, "return_cached_tokens_details": False,
        "return_prompt_token_ids": False, "return_meta_info": False, "use_audio_in_video": False, "regex": None, "ebnf": None,
        "lora_path": None, "session_params": None, "custom_params": None, "rid": None, "data_parallel_rank": None,
    },
    "vllm's defaults": {
        "watermarking": None, "logprob_token_ids": None, "routed_experts_prompt_start": 0, "return_token_offsets": False,
        "return_prompt_text": None, "return_mm_kwargs": True, "media_io_kwargs": None, "ec_transfer_params": None,
        "early_stopping": False, "session_id": None,
    },
    "everything unset": dict.fromkeys(field_rules.HINTS),
    "all tokens": {"repeat_last_n": -1, "penalty_last_n": -1},
}  # fmt: skip


@pytest.mark.parametrize("sent", SENT)
def test_what_asks_for_nothing_changes_nothing(sent: str) -> None:
    assert read_chat({**FOX, **SENT[sent]}) == read_chat(FOX)
    assert read_completion({"prompt": "fox", **SENT[sent]}) == read_completion({"prompt": "fox"})
    assert read_create({"input": "fox", **SENT[sent]}) == read_create({"input": "fox"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mirostat", 2), ("mirostat", False), ("tfs_z", 0.9), ("top_n_sigma", 1), ("xtc_probability", 0.5), ("dynatemp_range", 1),
        ("dry_multiplier", 0.8), ("n_predict", 5), ("n_probs", 1), ("repeat_penalty", 1.1), ("typical_p", 0.9), ("typical_p", True),
        ("grammar", "root ::= x"), ("lora", [{"id": 0}]), ("no_stop_trim", True), ("separate_reasoning", False),
        ("return_hidden_states", "last"), ("return_hidden_states", 0), ("reasoning_format", "none"), ("extra_body", {"a": 1}),
        ("min_new_tokens", 1), ("t_max_predict_ms", 1000), ("early_stopping", True), ("early_stopping", 0),
    ],
)  # fmt: skip
def test_what_asks_for_something_is_refused(name: str, value: Any) -> None:
    for read, body in ((read_chat, FOX), (read_completion, {"prompt": "fox"})):
        with pytest.raises(InvalidArgument) as refused:
            read({**body, name: value})
        assert refused.value.field == name


@pytest.mark.parametrize("penalty", [{"presence_penalty": 0.5}, {"frequency_penalty": -1}, {"repetition_penalty": 1.2}])
def test_of_how_many_tokens_a_penalty_counts(penalty: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read_chat({**FOX, **penalty, "repeat_last_n": 64})
    assert refused.value.field == "repeat_last_n"
    assert read_chat({**FOX, **penalty, "repeat_last_n": -1}) == read_chat({**FOX, **penalty})
    neutral = dict.fromkeys(penalty, 0) | {"repetition_penalty": 1.0}
    assert read_chat({**FOX, **neutral, "repeat_last_n": 64}) == read_chat({**FOX, **neutral})
    assert read_chat({**FOX, "repeat_penalty": 1, "repeat_last_n": 64}) == read_chat({**FOX, "repetition_penalty": 1})


def test_of_how_many_tokens_a_models_own_penalty_counts() -> None:
    # Its generation config may have one, of which a request without penalties says nothing.
    for body in ({}, {"presence_penalty": 0}):
        asked = read_chat({**FOX, **body, "repeat_last_n": 64})
        assert asked.sampling == read_chat({**FOX, **body}).sampling
        assert [each.field for each in asked.left_out] == ["repeat_last_n"]
    without = {**FOX, "ignore_generation_config": True}
    assert read_chat({**without, "repeat_last_n": 64}) == read_chat(without)


def test_a_penalty_that_is_turned_off_is_turned_off() -> None:
    # A model's generation config may have one.
    assert read_chat({**FOX, "repeat_penalty": 1}) == read_chat({**FOX, "repetition_penalty": 1.0})
    with pytest.raises(InvalidArgument) as refused:
        read_chat({**FOX, "repeat_penalty": 1, "repetition_penalty": 1.2})
    assert refused.value.field == "repeat_penalty"


def test_what_may_be_left_out_is_named() -> None:
    for asked, field in (({"samplers": ["min_p", "temperature"]}, "samplers"), ({"typical_p": 1}, "typical_p")):
        assert [each.field for each in read_chat({**FOX, **asked}).left_out] == [field]


def test_as_many_tokens_as_the_context_leaves() -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        assert read_chat({**FOX, name: -1}) == read_chat(FOX)
        for wrong in (0, -2):
            with pytest.raises(InvalidArgument) as refused:
                read_chat({**FOX, name: wrong})
            assert refused.value.field == name


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_where_llama_server_has_it(kind: str) -> None:
    schema = {"type": "object", "properties": {}}
    asked = read_chat({**FOX, "response_format": {"type": kind, "schema": schema}})
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert asked.sampling == read_chat({**FOX, "response_format": named}).sampling
    assert asked.form_field == "response_format.schema"


def test_a_schema_that_allows_anything() -> None:
    form = {"type": "json_object", "schema": {}}
    assert read_chat({**FOX, "response_format": form}) == read_chat({**FOX, "response_format": {"type": "json_object"}})
    named = {"name": "a", "schema": {}}
    plain = read_chat({**FOX, "response_format": {"type": "json_schema", "json_schema": named}})
    assert read_chat({**FOX, "response_format": {"type": "json_schema", "schema": {}}}).sampling == plain.sampling
    for kind, allowed in (("json_schema", "unset where schema is set"), ("json_object", "unset where type is json_object")):
        with pytest.raises(InvalidArgument) as refused:
            read_chat({**FOX, "response_format": {"type": kind, "schema": {}, "json_schema": named}})
        assert (refused.value.field, refused.value.allowed) == ("response_format.json_schema", allowed)


def test_a_form_may_be_written_out_whole() -> None:
    form: dict[str, Any] = {
        "json": None, "regex": "a+", "choice": None, "grammar": None, "json_object": None, "disable_fallback": False,
        "disable_any_whitespace": False, "disable_additional_properties": False, "whitespace_pattern": None,
        "structural_tag": None,
    }  # fmt: skip
    assert read_chat({**FOX, "structured_outputs": form}) == read_chat({**FOX, "structured_outputs": {"regex": "a+"}})
    for asked in ({"disable_any_whitespace": True}, {"disable_additional_properties": True}, {"whitespace_pattern": " "}):
        with pytest.raises(InvalidArgument) as refused:
            read_chat({**FOX, "structured_outputs": form | asked})
        assert refused.value.field == f"structured_outputs.{next(iter(asked))}"
