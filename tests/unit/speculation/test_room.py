"""The room that a prompt leaves to its answer: the example of ``speculation/room.py``."""

from __future__ import annotations

import pytest

from speculation.errors import InvalidArgument, PromptTooLong
from speculation.room import check_fits, longest_answer, room_behind
from speculation.types import SamplingDefaults

PROMPT, CONTEXT = 100, 512


def test_a_prompt_leaves_the_rest_of_the_context() -> None:
    assert room_behind(PROMPT, CONTEXT) == 412
    assert room_behind(CONTEXT - 1, CONTEXT) == 1
    with pytest.raises(PromptTooLong) as caught:
        room_behind(CONTEXT, CONTEXT, "messages")
    assert (caught.value.field, caught.value.value) == ("messages", "512 tokens")
    assert caught.value.allowed == "at most 511 tokens (this model's maximum context length is 512 tokens)"


def test_a_length_beyond_the_room_is_refused() -> None:
    for fitting in (None, 50, 412):
        check_fits("max_tokens", fitting, 412, CONTEXT)
    with pytest.raises(InvalidArgument) as caught:
        check_fits("max_tokens", 500, 412, CONTEXT)
    assert (caught.value.field, caught.value.value) == ("max_tokens", "500")
    assert caught.value.allowed == "at most 412, what the prompt leaves: this model's maximum context length is 512 tokens"


@pytest.mark.parametrize(
    ("asked", "defaults", "most", "otherwise", "longest"),
    [
        (50, SamplingDefaults(max_tokens=600), None, 256, 50),
        (None, SamplingDefaults(max_tokens=600), None, 256, 412),
        (None, SamplingDefaults(max_length=300), None, 256, 200),
        (None, SamplingDefaults(max_tokens=70, max_length=300), None, 256, 70),
        (None, SamplingDefaults(), None, 256, 256),
        (None, SamplingDefaults(), 20, 256, 20),
        (None, SamplingDefaults(), None, None, 412),
    ],
)
def test_the_request_goes_before_the_model_and_the_model_before_the_server(
    asked: int | None, defaults: SamplingDefaults, most: int | None, otherwise: int | None, longest: int
) -> None:
    found = longest_answer(asked, defaults=defaults, prompt_length=PROMPT, room=412, most=most, otherwise=otherwise)
    assert found == longest


def test_a_prompt_as_long_as_the_models_max_length_needs_a_request_that_says() -> None:
    with pytest.raises(InvalidArgument) as caught:
        longest_answer(None, defaults=SamplingDefaults(max_length=PROMPT), prompt_length=PROMPT, room=412)
    assert (caught.value.field, caught.value.value) == ("max_tokens", "unset")
    assert longest_answer(50, defaults=SamplingDefaults(max_length=PROMPT), prompt_length=PROMPT, room=412) == 50
