"""Limits of thoughts: a tiny model's own answer up to the limit, the mark that ends a thought there, and the same with drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from services.api.config import HttpConfig
from services.api.http.openai.prompt_thought import limits_thoughts
from speculation.errors import InvalidArgument
from tests.contract.test_openai_streams import served
from tests.servers.http_service import HttpService, http_served
from tests.servers.responses import CLIENT
from tests.servers.scripted_router import ScriptedRouter
from tests.tiny_models.tiny import make_tiny_model

FOX: list[Any] = [{"role": "user", "content": "fox"}]
CHAT = "/v1/chat/completions"
_BEGUN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|><think>"
_OPEN = _BEGUN.removesuffix("<think>") + "{# </think> #}"
_MOST = 40


def _folder(folder: Path, template: str, *, special: bool) -> Path:
    make_tiny_model(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    marks = [AddedToken(name, normalized=False, special=special) for name in ("<think>", "</think>")]
    tokenizer.add_tokens(marks, special_tokens=special)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["special", "added", "not begun"])
def thinker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HttpService, bool]]:
    """A model whose marks are special tokens, or have text; and whether its prompts begin a thought."""
    begun = request.param != "not begun"
    folder = _folder(tmp_path_factory.mktemp("thinker"), _BEGUN if begun else _OPEN, special=request.param != "added")
    with http_served(folder) as service:
        yield service, begun


def ids(service: HttpService, **body: Any) -> list[int]:
    asked = {"messages": FOX, "max_tokens": _MOST, "return_token_ids": True, **body}
    answer = CLIENT.post(service.url + CHAT, json=asked)
    assert answer.status_code == 200 and "x-outrider-ignored" not in answer.headers, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def text_of(service: HttpService, tokens: list[int]) -> str:
    """A mark that has text may be spelled."""
    found: str = CLIENT.post(f"{service.url}/detokenize", json={"tokens": tokens}).json()["prompt"]
    return found


def marks_of(service: HttpService) -> tuple[int, int]:
    begin, end = CLIENT.post(f"{service.url}/tokenize", json={"prompt": "<think></think>"}).json()["tokens"][-2:]
    return begin, end


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_thought_ends_at_its_limit(thinker: tuple[HttpService, bool], seed: int) -> None:
    service, begun = thinker
    begin, end = marks_of(service)
    # Neither ends by itself, so that the limit alone decides. A model that begins thoughts by itself does so at once.
    held: dict[str, Any] = {"seed": seed, "logit_bias": {"0": -100, str(end): -100}}
    if not begun:
        held["logit_bias"][str(begin)] = 100
    free = ids(service, **held)
    assert len(free) == _MOST and end not in free
    start = 0 if begun else 1
    for limit in (0, 1, 7, _MOST - 2):
        for strategy in ("autoregressive", "prompt_lookup", "recycling", "blend"):
            cut = ids(service, **held, thinking_token_budget=limit, speculation={"strategy": strategy})
            assert cut[: start + limit] == free[: start + limit], (limit, strategy)
            rest = text_of(service, cut[start + limit :])
            assert rest.startswith("</think>"[: len(rest)]) and rest, (limit, strategy)
            assert end not in cut[start + limit + 1 :] and len(cut) == _MOST
    # No answer is longer than that.
    assert ids(service, **held, thinking_token_budget=_MOST) == free


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_a_thought_that_ends_by_itself_has_the_same_answer(thinker: tuple[HttpService, bool], seed: int) -> None:
    service, begun = thinker
    begin, end = marks_of(service)
    bias = {str(end): 4.0, "0": -100.0} if begun else {str(end): 4.0, str(begin): 2.0, "0": -100.0}
    free = ids(service, seed=seed, logit_bias=bias)
    length = free.index(end) if end in free else _MOST
    for limit in range(length, _MOST):
        for strategy in ("autoregressive", "recycling"):
            same = ids(service, seed=seed, logit_bias=bias, thinking_token_budget=limit, speculation={"strategy": strategy})
            assert same == free, (limit, strategy)


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_may_end_within_its_thought(thinker: tuple[HttpService, bool], seed: int) -> None:
    service, _ = thinker
    bias = {"0": 6.0}
    free = ids(service, seed=seed, logit_bias=bias)
    for limit in (len(free), _MOST):
        assert ids(service, seed=seed, logit_bias=bias, thinking_token_budget=limit) == free


def test_the_other_doors_say_the_same(thinker: tuple[HttpService, bool]) -> None:
    service, begun = thinker
    begin, end = marks_of(service)
    held: dict[str, Any] = {"seed": 5, "logit_bias": {"0": -100, str(end): -100, **({} if begun else {str(begin): 100})}}
    cut = ids(service, **held, thinking_token_budget=6)
    told = {"return_token_ids": True, **held}
    response = CLIENT.post(
        f"{service.url}/v1/responses", json={"input": "fox", "max_output_tokens": _MOST, "thinking_token_budget": 6, **told}
    )
    thinking = {"type": "enabled", "budget_tokens": 6}
    message = CLIENT.post(
        f"{service.url}/v1/messages", json={"messages": FOX, "max_tokens": _MOST, "thinking": thinking, **told}
    )
    assert response.json()["token_ids"] == message.json()["token_ids"] == cut
    # There is no switch in this template.
    assert message.headers["x-outrider-ignored"] == "thinking"


def test_what_a_limit_cannot_be_beside_is_named(thinker: tuple[HttpService, bool]) -> None:
    service, _ = thinker
    for more, field in (({"min_tokens": 3}, "min_tokens"), ({"ignore_eos": True}, "ignore_eos")):
        answer = CLIENT.post(service.url + CHAT, json={"messages": FOX, "max_tokens": 9, "thinking_token_budget": 3, **more})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert "thinking_token_budget" in answer.json()["error"]["message"]
    for limit in (-1, 1.5, "3"):
        answer = CLIENT.post(service.url + CHAT, json={"messages": FOX, "thinking_token_budget": limit})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_token_budget")
    formed = {"messages": FOX, "max_tokens": 30, "thinking_token_budget": 3, "response_format": {"type": "json_object"}}
    answer = CLIENT.post(service.url + CHAT, json=formed)
    assert answer.status_code == 200 and answer.headers["x-outrider-ignored"] == "thinking_token_budget"


async def test_a_limit_that_the_model_cannot_be_held_to_is_named() -> None:
    body = {"messages": FOX, "max_tokens": 9, "thinking_token_budget": 3}
    cards: list[dict[str, Any]] = [{}, {"thoughts": "think"}, {"thoughts": "harmony", "special_tokens": {"<|end|>": 7}}]
    for changes in cards:
        router = ScriptedRouter("ok").with_card(**changes)
        assert not limits_thoughts(router.card)
        async with served(router) as (client, _):
            answer = await client.post(CHAT, json=body)
            assert (answer.status_code, answer.headers["x-outrider-ignored"]) == (200, "thinking_token_budget")
            assert router.asked[-1].sampling.structured_outputs is None or changes.get("thoughts") == "harmony"
        async with served(router, HttpConfig(port=0, unknown_fields="refuse")) as (client, _):
            answer = await client.post(CHAT, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_token_budget")


async def test_a_limit_that_was_left_out_is_named_in_no_error() -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {}}},
    }
    body = {"messages": FOX, "max_tokens": 9, "min_tokens": 2, "thinking_token_budget": 3, "tools": [tool]}
    router = ScriptedRouter("ok").with_card(thoughts="think")
    router.fails = (0, InvalidArgument("min_tokens", 2, "0 with structured_outputs.grammar"))
    async with served(router) as (client, _):
        answer = await client.post(CHAT, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"] == "min_tokens is 2: must be 0 with tools"
