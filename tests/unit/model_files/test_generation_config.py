"""A model's generation_config.json: every field has its answer, and requests get what it says unless they say otherwise."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from services.api.messages import RequestedSampling
from services.model_files.generation_config import FILE, read_generation_config
from services.model_files.generation_config import GenerationConfig as Found
from services.model_files.generation_fields import HARMLESS, HONOURED, REFUSED
from services.router.sampling import complete_sampling
from services.verifier.choosing.processors import build_pipeline
from speculation.acceptance import stop_token_ids
from speculation.errors import ConfigurationError, InvalidArgument
from speculation.types import SamplingDefaults, SamplingParams
from tests.running.refusals import refuses
from tests.tiny_models.generation import PROMPT, VOCABULARY, card, write


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A model's small files alone."""
    for name in ("config.json", FILE):
        shutil.copy(tiny_model / name, tmp_path / name)
    return tmp_path


def complete(folder: Path, prompt: int = len(PROMPT), **asked: Any) -> SamplingParams:
    """What a request gets of the model in ``folder``."""
    return complete_sampling(RequestedSampling(**asked), card(read_generation_config(folder).defaults), prompt)


def refusal(folder: Path, *given: Any, **more: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        read_generation_config(folder, *given, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- every field has an answer ------------------------------------------------------------------------------------


def test_every_field_of_the_installed_transformers_has_one_answer() -> None:
    """A field that this finds is new in transformers: honour it, say why it is harmless, or refuse it."""
    answers = [*HONOURED, *REFUSED, *HARMLESS]
    assert len(answers) == len(set(answers))
    assert set(vars(GenerationConfig())) - set(answers) == set()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 4), ("num_return_sequences", 2), ("penalty_alpha", 0.6), ("dola_layers", "low"), ("guidance_scale", 1.5),
        ("watermarking_config", {"bias": 2.5}), ("max_time", 3.0), ("token_healing", True), ("is_assistant", True),
        ("constraints", [[1]]), ("force_words_ids", [[1]]), ("streamer", 1),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(folder: Path, name: str, value: Any) -> None:
    message = refusal(write(folder, **{name: value}))
    assert f"{FILE}: {name} is {json.dumps(value)}: " in message
    # And the way out that it names is one.
    assert f"verifier.override_generation_config={{{name}: null}}" in message
    assert read_generation_config(folder, override={name: None}).eos_token_ids == {0}
    assert "verifier.generation_config=none" in message
    assert read_generation_config(folder, "none").eos_token_ids == {0}


def test_every_refusal_is_for_what_generate_would_do_otherwise(folder: Path) -> None:
    nothing = {
        "num_beams": 1,
        "num_return_sequences": 1,
        "penalty_alpha": 0.0,
        "guidance_scale": 1.0,
        "token_healing": False,
    }
    content = {**dict.fromkeys(REFUSED), **nothing, **dict.fromkeys(HARMLESS, 1)}
    found = read_generation_config(write(folder, **content))
    assert found == read_generation_config(write(folder))
    assert found.notes == ()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", "warm", "a number from 0 to 100"), ("temperature", True, "a number from 0 to 100"),
        ("temperature", float("nan"), "a number from 0 to 100"), ("temperature", -1, "a number from 0 to 100"),
        ("top_k", -1, "a whole number from 0"), ("top_k", 1.5, "a whole number from 0"), ("top_p", 0, "a number above 0, at most 1"),
        ("top_p", 1.1, "a number above 0, at most 1"), ("min_p", 2, "a number from 0 to 1"), ("repetition_penalty", 0, "a number from 0.01 to 10"),
        pytest.param("repetition_penalty", 10**400, "a number from 0.01 to 10", id="huge"), ("do_sample", "yes", "true or false"),
        ("max_new_tokens", 0, "a whole number from 1"), ("max_length", None.__class__.__name__, "a whole number from 1"),
        ("no_repeat_ngram_size", [2], "a whole number"), ("suppress_tokens", 3, "a list of token ids"),
        ("suppress_tokens", [-1], "a list of token ids"), ("bad_words_ids", [3], "a list of lists of token ids"),
        ("bad_words_ids", [], "a list of lists of token ids"), ("bad_words_ids", [[]], "a list of lists of token ids"),
        ("sequence_bias", {"3": 1.0}, "a list of pairs"), ("sequence_bias", [[[3], "x"]], "a list of pairs"),
        pytest.param("sequence_bias", [[[3], 10**400]], "a list of pairs", id="huge-bias"), ("sequence_bias", [[[], 1.0]], "a list of pairs"),
        ("forced_eos_token_id", "end", "a token id, or a list"), ("eos_token_id", "end", "a token id, or a list"),
        ("eos_token_id", [1, None], "a token id, or a list"), ("eos_token_id", True, "a token id, or a list"),
        ("exponential_decay_length_penalty", [3], "a pair"), ("exponential_decay_length_penalty", 3, "a pair"),
        ("exponential_decay_length_penalty", [3, "x"], "a pair"), ("typical_p", 0, "a number above 0"), ("top_h", 2, "a number above 0"),
        ("epsilon_cutoff", -1, "a number from 0 to 1"), ("eta_cutoff", 2, "a number from 0 to 1"), ("stop_strings", [""], "at most 16 texts"),
        ("stop_strings", 3, "at most 16 texts"), ("forced_bos_token_id", -1, "a whole number from 0"),
    ],
)  # fmt: skip
def test_values_of_the_wrong_kind(folder: Path, name: str, value: Any, allowed: str) -> None:
    message = refusal(write(folder, **{name: value}))
    assert f"{FILE}: {name} is " in message
    assert f"must be {allowed}" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"forced_eos_token_id": 320}, "forced_eos_token_id is 320: token ids must be below 320"),
        ({"forced_bos_token_id": 999}, "forced_bos_token_id is 999: token ids must be below 320"),
        ({"bad_words_ids": [[1, 400]]}, "bad_words_ids is [[1, 400]]: token ids must be below 320"),
        ({"sequence_bias": [[[400], 1.0]]}, "sequence_bias is [[[400], 1.0]]: token ids must be below 320"),
        ({"forced_eos_token_id": [3], "suppress_tokens": [3, 4]}, "suppress_tokens suppresses what it forces"),
        ({"exponential_decay_length_penalty": [3, 1.1], "eos_token_id": None}, "there is no eos_token_id"),
        ({"exponential_decay_length_penalty": [3, 1.1], "eos_token_id": 400}, "there is no eos_token_id"),
        ({"do_sample": True, "temperature": 0}, "with do_sample it must be from 0.001 to 100"),
    ],
)
def test_values_that_do_not_go_together(folder: Path, content: dict[str, Any], message: str) -> None:
    assert message in refusal(write(folder, **content), vocab_size=VOCABULARY)


@pytest.mark.parametrize("text", ["", "{", "[1]", "nothing", '{"a": ' * 5000, b"\xff\xfe", "version https://git-lfs\n"])
def test_a_file_that_is_none(folder: Path, text: str | bytes) -> None:
    (folder / FILE).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert f"cannot load the model at {folder}: {FILE} " in refusal(folder)
    assert f"cannot load the model at {folder}: {FILE} " in refusal(folder, "none")


numbers = st.one_of(
    st.integers(-3, 400),
    st.floats(),
    st.floats(0, 1.5),
    st.sampled_from([0, 1, 1.0, 1e-300, 1e300, 10**400, 0.999999, 0.001]),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.text(max_size=3), numbers),
    lambda below: st.one_of(st.lists(below, max_size=3), st.dictionaries(st.text(max_size=2), below, max_size=2)),
    max_leaves=6,
)
# Near enough to what the fields want that some fit.
ids = st.lists(st.integers(0, 330), max_size=3)
near = st.one_of(values, ids, st.lists(ids, max_size=3), st.lists(st.tuples(ids, numbers).map(list), max_size=2))


@pytest.mark.exhaustive
@given(st.dictionaries(st.sampled_from(sorted({*HONOURED, *REFUSED, *HARMLESS})), near, max_size=4))
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.filterwarnings("error")
def test_whatever_a_file_holds_is_refused_in_a_line_or_works(folder: Path, content: dict[str, Any]) -> None:
    (folder / FILE).write_text(json.dumps(content))
    found, refused = Found(), ""
    try:
        found = read_generation_config(folder, vocab_size=VOCABULARY)
    except ConfigurationError as error:
        refused = str(error)
    assert "\n" not in refused
    assert not refused or any(name in refused for name in content)
    for asked in ({}, {"temperature": 1.0}, {"min_tokens": 2, "max_tokens": 3}):
        if (
            "max_tokens" not in asked
            and found.defaults.max_tokens is None
            and (found.defaults.max_length or 99) <= len(PROMPT)
        ):
            continue
        params = complete_sampling(RequestedSampling(**asked), card(found.defaults), len(PROMPT))
        stop_ids = stop_token_ids(params, found.eos_token_ids)
        pipeline = build_pipeline(params, prompt_length=len(PROMPT), stop_ids=stop_ids, model=found.processors)
        if pipeline is not None:
            for history in (PROMPT, (*PROMPT, 3), (*PROMPT, *range(200))):
                assert pipeline(torch.linspace(-4, 4, VOCABULARY), history).shape == (VOCABULARY,)


# --- where it comes from ------------------------------------------------------------------------------------------


def test_another_file_overrides_and_none(folder: Path, tmp_path: Path) -> None:
    write(folder, do_sample=True, temperature=0.5, suppress_tokens=[3])
    other = tmp_path / "other"
    other.mkdir()
    assert "verifier.generation_config is " in refusal(folder, str(other))
    write(other, do_sample=True, temperature=0.9, top_k=0)
    for choice in (str(other), str(other / FILE)):
        assert read_generation_config(folder, choice).defaults == SamplingDefaults(temperature=0.9, top_k=0)
    (other / FILE).write_text("{}")
    assert read_generation_config(folder, str(other)).eos_token_ids == {0}
    none = read_generation_config(folder, "none")
    assert (none.defaults, none.processors.shown) == (SamplingDefaults(), ())
    changed = read_generation_config(folder, override={"temperature": 0.7, "suppress_tokens": None})
    assert (changed.defaults.temperature, changed.processors.shown) == (0.7, ())
    assert "names temprature, which is unknown; known: bad_words_ids" in refusal(folder, override={"temprature": 1})


def test_without_the_file_the_models_configuration_may_say_it(folder: Path) -> None:
    (folder / FILE).unlink()
    (folder / "config.json").write_text(
        json.dumps({"no_repeat_ngram_size": 3, "text_config": {"eos_token_id": 7, "min_length": 4}})
    )
    found = read_generation_config(folder)
    theirs = GenerationConfig.from_pretrained(folder, config_file_name="config.json", _from_model_config=True)
    assert found.processors.no_repeat_ngram_size == theirs.no_repeat_ngram_size == 3
    assert found.defaults.min_length == theirs.min_length == 4
    assert found.eos_token_ids == {theirs.eos_token_id} == {7}


def test_end_of_text_tokens_beyond_the_vocabulary_end_nothing_and_are_told(folder: Path) -> None:
    found = read_generation_config(write(folder, eos_token_id=[320, 5, -1]), vocab_size=VOCABULARY)
    assert found.eos_token_ids == {5}
    assert "eos_token_id 320, -1: no token of the model" in found.notes[0]
    assert read_generation_config(write(folder, eos_token_id=400), vocab_size=VOCABULARY).eos_token_ids == frozenset()


def test_unknown_fields_are_told_and_have_no_effect(folder: Path) -> None:
    (note,) = read_generation_config(write(folder, chat_format="chatml", assistant_token_id=3)).notes
    assert "assistant_token_id, chat_format: unknown" in note


def test_it_is_read_without_transformers() -> None:
    script = (
        "import sys; from services.model_files.generation_config import read_generation_config; "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
    )
    assert done.stdout.strip() == "[]"


# --- what requests get --------------------------------------------------------------------------------------------


def test_a_request_goes_before_the_model_and_the_model_before_what_holds_for_all(folder: Path) -> None:
    write(folder, do_sample=True, temperature=0.6, top_p=0.9, repetition_penalty=1.1, max_new_tokens=40, stop_strings="END")
    found = complete(folder)
    assert (found.temperature, found.top_p, found.top_k, found.repetition_penalty) == (0.6, 0.9, 50, 1.1)
    assert (found.max_tokens, found.stop) == (40, ("END",))
    # Also where it asks for what holds for all.
    asked = complete(folder, temperature=0, top_p=1, top_k=0, repetition_penalty=1, max_tokens=256, stop=("x",), seed=0)
    assert asked == SamplingParams(stop=("x",))
    ignored = complete(folder, ignore_generation_config=True, seed=0)
    assert ignored == SamplingParams(ignore_generation_config=True)
    assert complete(folder).seed != complete(folder).seed


def test_a_model_that_does_not_ask_for_sampling_is_greedy_and_keeps_its_cuts(folder: Path) -> None:
    write(folder, temperature=0.6, top_p=0.9)
    assert complete(folder).temperature == 0
    assert complete(folder, temperature=0.8).top_p == 0.9
    assert complete(folder, temperature=0.8).top_k == 0


def test_lengths(folder: Path) -> None:
    write(folder, max_length=30, min_length=20)
    assert (complete(folder).max_tokens, complete(folder).min_tokens) == (22, 12)
    assert complete(folder, prompt=25).min_tokens == 0
    assert (complete(folder, max_tokens=5).max_tokens, complete(folder, max_tokens=5).min_tokens) == (5, 5)
    assert complete(folder, min_tokens=0).min_tokens == 0
    with refuses(InvalidArgument, field="max_tokens", value="unset", allowed="set: the prompt has 30 tokens"):
        complete(folder, prompt=30)
    write(folder, max_length=30, max_new_tokens=100, min_new_tokens=3, min_length=20)
    assert (complete(folder).max_tokens, complete(folder).min_tokens) == (100, 3)
    assert complete(folder, prompt=500).max_tokens == 12
    with refuses(
        InvalidArgument,
        field="min_tokens",
        value=13,
        allowed="at most 12, what the prompt leaves: this model's maximum context length is 512 tokens",
    ):
        complete(folder, prompt=500, min_tokens=13)
    with refuses(InvalidArgument, field="min_tokens", value=101, allowed="a whole number from 0 to 100"):
        complete(folder, min_tokens=101)
    with refuses(
        InvalidArgument,
        field="max_tokens",
        value=13,
        allowed="at most 12, what the prompt leaves: this model's maximum context length is 512 tokens",
    ):
        complete(folder, prompt=500, max_tokens=13)


@pytest.mark.parametrize("given", [{"temperature": -1}, {"max_tokens": 0}, {"min_tokens": 5, "max_tokens": 4}, {"top_p": 0}])
def test_values_of_requests_are_checked_as_they_come(given: dict[str, Any]) -> None:
    with refuses(InvalidArgument, *next(iter(given.items()))):
        RequestedSampling(**given)


# --- what is done to logits ---------------------------------------------------------------------------------------


def test_a_penalty_that_grows_for_ever_stays_a_number(folder: Path) -> None:
    found = read_generation_config(write(folder, exponential_decay_length_penalty=[2, 900.0], eos_token_id=7))
    params = SamplingParams(max_tokens=5000)
    pipeline = build_pipeline(params, prompt_length=1, stop_ids=frozenset({7}), model=found.processors)
    assert pipeline is not None
    for length in (12, 5000):
        row = pipeline(torch.full((VOCABULARY,), -2.0), [1] * length)
        assert int(row.argmax()) == 7
        assert row.isfinite().all()


def test_a_request_can_do_without(folder: Path) -> None:
    found = read_generation_config(write(folder, suppress_tokens=[3]))
    row = torch.zeros(VOCABULARY)
    for ignore, expected in ((False, float("-inf")), (True, 0.0)):
        params = SamplingParams(logit_bias={4: 1.0}, ignore_generation_config=ignore)
        pipeline = build_pipeline(params, prompt_length=1, stop_ids=frozenset(), model=found.processors)
        assert pipeline is not None
        assert pipeline(row, [1])[3] == expected


def test_what_is_on_is_shown(folder: Path) -> None:
    found = read_generation_config(
        write(folder, no_repeat_ngram_size=3, bad_words_ids=[[1, 2]], renormalize_logits=True, typical_p=1)
    )
    assert dict(found.processors.shown) == {
        "no_repeat_ngram_size": "3", "bad_words_ids": "[[1, 2]]", "renormalize_logits": "true",
    }  # fmt: skip
