"""What other strategies would have made of an answer: the passes that they do take for it, found without running the model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider import Client
from tests.contract.test_openai_calls import CLIENT, post, stream
from tests.servers.http_service import HttpService, http_served

TEXT = "the quick brown fox jumps over the lazy dog, the quick brown fox jumps over the lazy dog, the quick brown fox"
# Of four tokens, an answer repeats itself enough to be drafted.
ASKED: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "seed": 3, "allowed_token_ids": [40, 41, 42, 43]}
PATIENT = "verifier.draft_deadline_s=1"
# Their drafts depend on nothing but the text.
TOKENS_ALONE = ("autoregressive", "prompt_lookup", "anpd")


@pytest.fixture(scope="module")
def service(tiny_model: Path) -> Iterator[HttpService]:
    """Waits for every draft, however busy the machine is."""
    with http_served(tiny_model, PATIENT) as made:
        yield made


@pytest.fixture(scope="module")
def client(service: HttpService) -> Iterator[Client]:
    with Client(service.grpc) as made:
        yield made


@pytest.mark.examples(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_replay_takes_the_passes_of_the_real_answer(client: Client, temperature: float) -> None:
    asked = {**ASKED, "temperature": temperature}
    plain = client.generate(TEXT, strategy="autoregressive", **asked)
    told = client.generate(TEXT, strategy="autoregressive", compare=TOKENS_ALONE, **asked)
    assert (told.text, told.token_ids) == (plain.text, plain.token_ids) and not plain.comparisons
    assert tuple(each.strategy for each in told.comparisons) == TOKENS_ALONE
    for each in told.comparisons:
        # Nothing is remembered of requests with a salt of their own.
        real = client.generate(TEXT, strategy=each.strategy, cache_salt=f"{each.strategy} {temperature}", **asked)
        assert real.token_ids == plain.token_ids
        assert each.num_passes == real.speculative_decoding.num_spec_steps
        assert each.tokens_per_pass == pytest.approx(real.speculative_decoding.mean_acceptance_length)
        # The service of these tests has no table of costs.
        assert (each.exact, each.without, each.seconds) == (True, (), None)
    assert min(each.num_passes or 0 for each in told.comparisons) < 120


@pytest.mark.exhaustive
def test_drafts_that_depend_on_what_was_learnt_before_are_replayed_as_things_are(tiny_model: Path) -> None:
    # Suffixes are weighed by how often such drafts were right, of anybody. So both services are new.
    with http_served(tiny_model, PATIENT) as new, Client(new.grpc) as one:
        real = one.generate(TEXT, strategy="suffix", **ASKED).speculative_decoding
    with http_served(tiny_model, PATIENT) as new, Client(new.grpc) as other:
        (found,) = other.generate(TEXT, strategy="autoregressive", compare="suffix", **ASKED).comparisons
    assert (found.num_passes, found.exact) == (real.num_spec_steps, True) and real.num_spec_steps < 60


def test_what_a_replay_does_not_know_is_told(client: Client) -> None:
    (found,) = client.generate(TEXT, compare="blend", **ASKED).comparisons
    assert not found.exact and found.num_passes is not None and 1 < found.num_passes <= 120


def test_a_stop_string_ends_what_is_compared(client: Client) -> None:
    whole = client.generate(TEXT, **ASKED)
    cut = client.generate(TEXT, stop=whole.text[20:23], compare=["autoregressive"], **ASKED)
    assert [each.num_passes for each in cut.comparisons] == [len(cut.token_ids)] and len(cut.token_ids) < 120


def test_http_says_the_same_whole_and_streamed(service: HttpService, client: Client) -> None:
    body = {"prompt": TEXT, "temperature": 0, **ASKED, "speculation": {"compare": ["anpd", "autoregressive"]}}
    figures = post(service, "/v1/completions", **body)["metrics"]["speculative_decoding"]
    events = stream(service, "/v1/completions", **body, stream_options={"include_usage": True})
    assert events[-1]["metrics"]["speculative_decoding"]["comparisons"] == figures["comparisons"]
    expected = client.generate(TEXT, compare=["anpd", "autoregressive"], **ASKED).comparisons
    assert [each["num_passes"] for each in figures["comparisons"]] == [each.num_passes for each in expected]
    assert figures["comparisons"][1] == {
        "strategy": "autoregressive", "num_passes": 120, "tokens_per_pass": 1.0, "seconds": None, "exact": True,
        "without": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("names", "allowed"),
    [
        (["magic"], "one of anpd, auto, autoregressive, "),
        (["rest"], "this server has no retrieval index"),
        (["suffix", "suffix"], "each once"),
        (["suffix"] * 9, "at most 8 strategies"),
        (["eagle"], "this server has no checkpoint of eagle"),
        ([""], "one of anpd"),
    ],
)
def test_what_cannot_be_compared_is_refused_at_the_start(
    service: HttpService, client: Client, names: list[str], allowed: str
) -> None:
    body = {"prompt": TEXT, "speculation": {"compare": names}}
    error = CLIENT.post(service.url + "/v1/completions", json=body).json()["error"]
    assert error["param"] == "speculation.compare" and allowed in error["message"]
    began = time.monotonic()
    with pytest.raises(outrider.InvalidArgument) as refused:
        client.generate(TEXT, compare=names, **ASKED)
    assert refused.value.field == "speculation.compare" and time.monotonic() - began < 5


@pytest.mark.parametrize("compare", ["suffix", [5], {"suffix": 1}])
def test_a_list_of_names_is_wanted(service: HttpService, compare: Any) -> None:
    body = {"prompt": TEXT, "speculation": {"compare": compare}}
    error = CLIENT.post(service.url + "/v1/completions", json=body).json()["error"]
    assert (error["param"], error["code"]) == ("speculation.compare", "invalid_type")


def test_one_answer_is_compared(service: HttpService) -> None:
    body = {"prompt": TEXT, "n": 2, "speculation": {"compare": ["suffix"]}}
    error = CLIENT.post(service.url + "/v1/completions", json=body).json()["error"]
    assert error["param"] == "speculation.compare" and "2 answers" in error["message"]
