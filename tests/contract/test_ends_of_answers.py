"""Where answers begin and end in text: after the prompt's own text, at tokens that a stop or the tokenizer names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tokenizers import Tokenizer, decoders, models

from outrider import Client
from tests.servers.http_service import HttpService, http_served
from tests.tiny_models.tiny import make_tiny_model

CLIENT = httpx2.Client(timeout=60)


def llama_2_like(folder: Path) -> Path:
    """A tiny model whose tokenizer drops the space that a text begins with, and names another end than its model."""
    make_tiny_model(folder)
    vocabulary = {f"<0x{value:02X}>": 4 + value for value in range(256)}
    vocabulary |= {name: number for number, name in enumerate(("<|end|>", "<|user|>", "<|assistant|>", "<|system|>"))}
    vocabulary |= {"▁": 260, "▁fox": 261, "a": 262, "▁a": 263, "fox": 264, "<unk>": 265}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"])
    made.save(str(folder / "tokenizer.json"))
    file = folder / "tokenizer_config.json"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|user|>"}
    file.write_text(json.dumps({**settings, "chat_template": json.loads(file.read_text()).get("chat_template")}))
    return folder


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpService]:
    with http_served(llama_2_like(tmp_path_factory.mktemp("llama"))) as running:
        yield running


def ask(service: HttpService, path: str, **body: Any) -> dict[str, Any]:
    answer = CLIENT.post(f"{service.url}/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def complete(service: HttpService, **body: Any) -> dict[str, Any]:
    choice: dict[str, Any] = ask(service, "completions", **{"prompt": [262], "max_tokens": 1, **body})["choices"][0]
    return choice


def test_a_completion_begins_with_its_space(service: HttpService) -> None:
    choice = complete(service, allowed_token_ids=[261], logprobs=1)
    assert choice["text"] == " fox"
    assert choice["logprobs"]["tokens"] == [" fox"] and choice["logprobs"]["text_offset"] == [0]
    assert complete(service, allowed_token_ids=[261], echo=True)["text"] == "a fox"
    # A text that has just begun has none.
    assert complete(service, prompt=[1], allowed_token_ids=[261])["text"] == "fox"
    with Client(service.grpc) as client:
        assert client.generate(token_ids=[262], max_tokens=1, allowed_token_ids=[261]).text == " fox"


def test_a_stop_is_found_at_the_very_beginning(service: HttpService) -> None:
    choice = complete(service, allowed_token_ids=[261], max_tokens=4, stop=[" fox"])
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", " fox")


def test_a_character_that_the_prompt_begins_is_completed(service: HttpService) -> None:
    # The last of three bytes.
    choice = complete(service, prompt=[262, 4 + 0xE4, 4 + 0xBA], allowed_token_ids=[4 + 0xAC], echo=True)
    assert choice["text"] == "a京"


def test_a_conversation_begins_a_turn_or_continues_one(service: HttpService) -> None:
    messages = [{"role": "user", "content": "fox"}]
    asked: dict[str, Any] = {"max_tokens": 1, "allowed_token_ids": [261]}
    assert ask(service, "chat/completions", messages=messages, **asked)["choices"][0]["message"]["content"] == "fox"
    begun = [*messages, {"role": "assistant", "content": "a"}]
    answer = ask(service, "chat/completions", messages=begun, continue_final_message=True, **asked)
    assert answer["choices"][0]["message"]["content"] == " fox"


def test_a_stop_that_names_a_token_ends_the_answer(service: HttpService) -> None:
    choice = complete(service, allowed_token_ids=[2], max_tokens=4, stop=["<|assistant|>"], return_token_ids=True)
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "<|assistant|>")
    assert choice["token_ids"] == [2]
    shown = complete(service, allowed_token_ids=[2], max_tokens=4, stop=["<|assistant|>"], skip_special_tokens=False)
    assert (shown["text"], shown["finish_reason"]) == ("", "stop")


def test_the_tokenizers_own_end_ends_turns(service: HttpService) -> None:
    asked: dict[str, Any] = {"max_tokens": 3, "allowed_token_ids": [1]}
    turn = ask(service, "chat/completions", messages=[{"role": "user", "content": "fox"}], **asked)
    assert (turn["choices"][0]["finish_reason"], turn["usage"]["completion_tokens"]) == ("stop", 1)
    # A text goes on where the model's own generation config says no more, as in transformers.
    assert complete(service, **asked)["finish_reason"] == "length"
    more = ask(service, "chat/completions", messages=[{"role": "user", "content": "fox"}], ignore_eos=True, **asked)
    assert more["choices"][0]["finish_reason"] == "length"
