"""Gaps in texts over HTTP: suffix of /v1/completions and llama-server's /infill, on a model with the tokens and on one without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from services.api.http.llama_server.protocol import LlamaReply
from tests.servers.http_service import HttpService, http_served
from tests.tiny_models.tiny import make_tiny_model

CLIENT = httpx2.Client(timeout=60)
OWN = {"seed": 5, "temperature": 1.0}


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpService]:
    """A tiny model whose tokenizer has Qwen's tokens."""
    folder = make_tiny_model(tmp_path_factory.mktemp("coder"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    with http_served(folder) as service:
        yield service


def post(service: HttpService, path: str, **body: Any) -> httpx2.Response:
    return CLIENT.post(service.url + path, json=body)


def test_a_suffix_is_the_prompt_that_one_would_write_by_hand(coder: HttpService) -> None:
    more = {"max_tokens": 12, "return_token_ids": True, **OWN}
    filled = post(coder, "/v1/completions", prompt="the quick", suffix=" fox", n=2, **more).json()
    by_hand = "<|fim_prefix|>the quick<|fim_suffix|> fox<|fim_middle|>"
    ends = CLIENT.post(f"{coder.url}/tokenize", json={"prompt": "<|fim_pad|><|repo_name|><|file_sep|>"}).json()["tokens"]
    written = post(coder, "/v1/completions", prompt=by_hand, n=2, stop_token_ids=ends, **more).json()
    assert [choice["token_ids"] for choice in filled["choices"]] == [choice["token_ids"] for choice in written["choices"]]
    assert filled["choices"][0]["prompt_token_ids"] == written["choices"][0]["prompt_token_ids"]
    assert filled["choices"][0]["text"] == written["choices"][0]["text"]


def test_a_token_for_another_file_ends_what_fills_a_gap(coder: HttpService) -> None:
    (pad,) = CLIENT.post(f"{coder.url}/tokenize", json={"prompt": "<|fim_pad|>"}).json()["tokens"]
    forced = {"prompt": "the", "max_tokens": 5, "logit_bias": {str(pad): 100}, "return_token_ids": True, **OWN}
    ended = post(coder, "/v1/completions", suffix="x", **forced).json()["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"], ended["text"]) == ("stop", pad, "")
    assert post(coder, "/v1/completions", **forced).json()["choices"][0]["finish_reason"] == "length"


def test_infill_whole_and_streamed(coder: HttpService) -> None:
    asked = {
        "input_prefix": "the quick\n",
        "prompt": "br",
        "input_suffix": " fox",
        "n_predict": 12,
        "return_tokens": True,
        **OWN,
    }
    whole = post(coder, "/infill", **asked).json()
    told = LlamaReply.model_validate(whole, strict=True)
    assert told.stop_type == "limit" and told.tokens_predicted == 12 == len(told.tokens or [])
    same = post(coder, "/v1/completions", prompt="the quick\nbr", suffix=" fox", max_tokens=12, **OWN).json()
    assert told.content == same["choices"][0]["text"]
    text = post(coder, "/infill", **asked, stream=True).text
    events = [json.loads(block.removeprefix("data: ")) for block in text.removesuffix("\n\n").split("\n\n")]
    assert "".join(event["content"] for event in events) == told.content
    assert [id for event in events for id in event.get("tokens", ())] == told.tokens
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    stop = told.content[3:5]
    cut = post(coder, "/infill", **asked, stop=[stop]).json()
    assert (cut["stop_type"], cut["stopping_word"], cut["content"]) == (
        "word",
        stop,
        told.content[: told.content.index(stop)],
    )


def test_what_editors_send(coder: HttpService) -> None:
    """The bodies of llama.vim and llama.vscode: for a gap, and beforehand, so that its files are computed."""
    asked: dict[str, Any] = {
        "input_prefix": "the\n", "input_suffix": "fox\n", "input_extra": [{"text": "dog\n", "time": [1, 2], "filename": "a.py"}],
        "prompt": "quick", "n_predict": 8, "n_indent": 4, "top_k": 40, "top_p": 0.99, "stream": False, "cache_prompt": True,
        "samplers": ["top_k", "top_p", "infill"], "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "seed": 3,
    }  # fmt: skip
    left_out = ("n_indent", "samplers", "t_max_prompt_ms", "t_max_predict_ms", "response_fields")
    same = post(coder, "/infill", **{name: value for name, value in asked.items() if name not in left_out}).json()
    fields = [
        "content",
        "timings/prompt_n",
        "timings/predicted_n",
        "timings/predicted_ms",
        "truncated",
        "nothing",
        "content/a",
    ]
    answer = post(coder, "/infill", **asked, response_fields=fields)
    assert answer.headers["x-outrider-ignored"] == "samplers, n_indent, t_max_prompt_ms, t_max_predict_ms"
    told = answer.json()
    assert told.keys() == {"content", "timings/prompt_n", "timings/predicted_n", "timings/predicted_ms", "truncated"}
    assert (told["content"], told["timings/predicted_n"]) == (same["content"], 8)
    assert same["timings"]["prompt_n"] + same["timings"]["cache_n"] == same["tokens_evaluated"]
    streamed = post(coder, "/infill", **{**asked, "stream": True}, response_fields=["truncated"]).text
    events = [json.loads(block.removeprefix("data: ")) for block in streamed.removesuffix("\n\n").split("\n\n")]
    assert "".join(event.get("content", "") for event in events) == told["content"] and events[-1]["truncated"] is False
    warmed = post(coder, "/infill", **{**asked, "n_predict": 0, "samplers": [], "response_fields": [""]})
    assert (warmed.status_code, warmed.json()) == (200, {})


def test_infill_reads_other_files_first(coder: HttpService) -> None:
    files = [{"filename": "a.py", "text": "over"}, {"text": "dog"}]
    asked: dict[str, Any] = {"input_prefix": "", "input_suffix": "", "n_predict": 0, "input_extra": files}
    answer = post(coder, "/infill", **asked, stream=False, cache_prompt=True, id_slot=0, n_indent=0, seed=-1).json()
    by_hand = (
        "<|repo_name|>myproject\n<|file_sep|>a.py\nover<|file_sep|>tmp\ndog<|file_sep|>filename\n"
        "<|fim_prefix|><|fim_suffix|><|fim_middle|>"
    )
    assert answer["tokens_evaluated"] == CLIENT.post(f"{coder.url}/tokenize", json={"prompt": by_hand}).json()["count"]
    assert (answer["content"], answer["tokens_predicted"], answer["stop_type"]) == ("", 0, "limit")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/infill", {"input_suffix": "x"}, "input_prefix"),
        ("/infill", {"input_prefix": "x"}, "input_suffix"),
        ("/infill", {"input_prefix": "x", "input_suffix": "x", "input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ("/infill", {"input_prefix": "x", "input_suffix": "x", "n_indent": -1}, "n_indent"),
        ("/infill", {"input_prefix": "x", "input_suffix": "x", "response_fields": "content"}, "response_fields"),
        ("/infill", {"input_prefix": "x", "input_suffix": "x", "n_predict": -2}, "n_predict"),
        ("/infill", {"input_prefix": "x", "input_suffix": "x", "n_predict": 100_000}, "n_predict"),
        ("/infill", {"input_prefix": "x", "input_suffix": "x", "repeat_penalty": -1}, "repeat_penalty"),
        ("/infill", {"input_prefix": "x", "input_suffix": "x", "t_max_predict_ms": 0.5}, "t_max_predict_ms"),
        ("/infill", {"input_prefix": "x" * 100_000, "input_suffix": "x"}, "input_prefix"),
        ("/infill", {"input_prefix": "x", "input_suffix": "x" * 100_000}, "input_suffix"),
        ("/v1/completions", {"prompt": [5], "suffix": "x"}, "suffix"),
        ("/v1/completions", {"prompt": "x", "suffix": 5}, "suffix"),
        ("/v1/completions", {"prompt": "x", "suffix": "x", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": "x", "suffix": "x", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(coder: HttpService, path: str, body: dict[str, Any], field: str) -> None:
    answer = post(coder, path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


def test_a_model_without_the_tokens_refuses(both_entries: HttpService) -> None:
    for path, body, field in (
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/infill", {"input_prefix": "x", "input_suffix": "y"}, "input_suffix"),
    ):
        answer = post(both_entries, path, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert "no fill-in-the-middle tokens" in answer.json()["error"]["message"]
    assert post(both_entries, "/v1/completions", prompt="x", suffix="", max_tokens=1).status_code == 200


def test_a_tokenizer_is_told(tiny_model: Path, both_entries: HttpService) -> None:
    found = CLIENT.get(f"{both_entries.url}/tokenizer_info").json()
    settings = json.loads((tiny_model / "tokenizer_config.json").read_text())
    assert found["tokenizer_class"] == settings["tokenizer_class"] and found["eos_token"] == "<|end|>"
    assert "raise_exception" in found["chat_template"]
