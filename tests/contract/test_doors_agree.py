"""One question, the same tokens through every door; and no value of any field is the server's own failure on any of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.servers import malformed_http
from tests.servers.doors import CHAT, COMPLETIONS, DOORS, MESSAGES, RESPONSES, Question, post
from tests.servers.http_service import HttpService

FOX = ({"role": "system", "content": "quick"}, {"role": "user", "content": "the lazy fox"})
LONG: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}


@pytest.mark.examples(3)
@pytest.mark.parametrize(
    "question",
    [
        Question(conversation=FOX, sampling={**LONG, "temperature": 0}, logprobs=True),
        Question(conversation=FOX, sampling={**LONG, "seed": 11}, choices=3, logprobs=True),
        Question(conversation=FOX[1:], sampling={**LONG, "temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 2**52}),
        Question(
            conversation=FOX,
            sampling={**LONG, "seed": 13, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.2},
            choices=2,
        ),
        Question(conversation=FOX, sampling={**LONG, "seed": 14, "logit_bias": {"70": 5, "71": -100}, "stop_token_ids": [40]}),
        Question(conversation=FOX, sampling={**LONG, "seed": 15, "stop": ["e", "qu"], "min_tokens": 3}, choices=2),
    ],
    ids=lambda question: json.dumps(question.sampling)[:70],
)  # fmt: skip
def test_every_door_gives_the_same_tokens(both_entries: HttpService, question: Question) -> None:
    wanted = DOORS["gRPC"](both_entries, question, False)
    assert len(wanted) == question.choices and all(told.tokens for told in wanted)
    for name, ask in DOORS.items():
        for strategy in ("blend", "autoregressive"):
            own = {"strategy": strategy} if name == "gRPC" else {"speculation": {"strategy": strategy}}
            drafted = Question(
                conversation=question.conversation,
                sampling={**question.sampling, **own},
                choices=question.choices,
                logprobs=question.logprobs,
            )
            for streamed in (False, True):
                told = ask(both_entries, drafted, streamed)
                assert [(each.prompt, each.tokens) for each in told] == [(each.prompt, each.tokens) for each in wanted], name
                for mine, known in zip(told, wanted, strict=True):
                    # Messages have no place for them.
                    if mine.logprobs is not None:
                        assert mine.logprobs == pytest.approx(known.logprobs, abs=1e-6), name


BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": list(FOX), "max_tokens": 2},
    COMPLETIONS: {"prompt": "fox", "max_tokens": 2},
    MESSAGES: {"messages": list(FOX[1:]), "max_tokens": 2},
    RESPONSES: {"input": "fox", "max_output_tokens": 2, "store": False},
}
# What every door that has such a field must refuse.
WRONG: tuple[tuple[str, Any], ...] = (
    ("temperature", "x"), ("temperature", 1e308), ("temperature", -0.1), ("top_p", 1.1), ("top_k", -2), ("top_k", 0.5),
    ("min_p", 2), ("seed", "1"), ("seed", 10**30), ("logit_bias", {"x": 1}), ("logit_bias", {"70": 1e308}),
    ("logit_bias", {"99999999": 1}), ("stop_token_ids", [-1]), ("stop_token_ids", [10**9]), ("allowed_token_ids", []), ("bad_words", [" "]),
    ("presence_penalty", 3), ("frequency_penalty", True), ("repetition_penalty", -1), ("min_tokens", -1), ("min_tokens", 3),
    ("model", "gpt-9"), ("model", 7), ("speculation", {"strategy": "magic"}), ("speculation", {"strategi": "blend"}),
    ("speculation", []), ("speculation", {"sources": ["magic"]}), ("speculation", {"sources": []}), ("speculation", {"sources": "suffix"}),
    ("speculation", {"sources": ["suffix", "suffix"]}), ("speculation", {"sources": ["rest"]}), ("speculation", {"sources": [7]}),
    ("speculation", {"sources": ["suffix"], "strategy": "suffix"}), ("privacy", "maybe"), ("cache_salt", ""), ("priority", 2**40), ("request_id", "\n"), ("unheard_of", 1),
    ("structured_outputs", {"regex": "("}), ("structured_outputs", {"json": {"type": "unheard"}}), ("prediction", {"type": "x"}),
    ("stream", "yes"), ("stream_interval", 0), ("return_token_ids", 1), ("skip_special_tokens", "no"), ("ignore_eos", 2),
    ("tools", [{}]), ("tools", 7), ("tool_choice", {"type": "unheard"}), ("n", 0),
)  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
def test_what_is_wrong_is_wrong_at_every_door(both_entries: HttpService, path: str) -> None:
    for field, value in WRONG:
        answer = post(both_entries, path, {**BODIES[path], field: value})
        assert answer.status_code == (404 if value == "gpt-9" else 400), (field, value, answer.text)
        error = answer.json()["error"]
        # The first word of an error's sentence is the field.
        assert error["message"].startswith(field), (field, value, error)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", malformed_http.PATHS)
def test_no_value_of_any_field_is_our_failure(both_entries: HttpService, path: str) -> None:
    for field in malformed_http.FIELDS:
        for value in malformed_http.VALUES:
            answer = post(both_entries, path, {**malformed_http.good(path), field: value})
            assert answer.status_code in malformed_http.BAD | malformed_http.FINE, (field, value, answer.text)
