"""Where tokens come from, as the public APIs tell it: of the same answer, token by token, and with exactly its text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

import outrider
from outrider import Client
from tests.contract.test_openai_calls import CLIENT, FOX, content_of, post, stream
from tests.servers.http_service import HttpService

TEXTS = "the quick brown fox 東京 🙂🙃 the quick brown fox 東京 🙂🙃 the quick"
ASKED: dict[str, Any] = {"prompt": TEXTS, "max_tokens": 60, "seed": 3, "ignore_eos": True}
SOURCES = {"speculation": {"strategy": "blend", "report": "sources"}}


@pytest.fixture(scope="module")
def client(both_entries: HttpService) -> Any:
    with Client(both_entries.grpc) as made:
        yield made


def told(choice: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = choice["speculation"]["tokens"]
    return found


def streamed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tokens of all events; each event's are its text."""
    found = []
    for event in events:
        for choice in event["choices"]:
            text = choice.get("text", choice.get("delta", {}).get("content")) or ""
            tokens = told(choice) if "speculation" in choice else []
            assert "".join(each["text"] for each in tokens) == text
            found += tokens
    return found


def stops_of(text: str) -> list[list[str]]:
    """No stop string, one that ends the text in its middle, and one that only begins in it, at its end."""
    at = len(text) // 2
    return [[], [text[at : at + 3]], [text[-1:] + "\x00", text[-2:] + "\x00"]]


@pytest.mark.examples(3)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tokens", [60, 59, 58, 57])
def test_tokens_are_the_text_whatever_ends_it(both_entries: HttpService, temperature: float, tokens: int) -> None:
    asked = {**ASKED, "temperature": temperature, "max_tokens": tokens, "return_token_ids": True}
    for stop in stops_of(post(both_entries, "/v1/completions", **asked)["choices"][0]["text"]):
        plain = post(both_entries, "/v1/completions", **asked, stop=stop)["choices"][0]
        answer = post(both_entries, "/v1/completions", **asked, **SOURCES, stop=stop)
        (choice,) = answer["choices"]
        assert "speculation" not in plain
        assert (choice["text"], choice["token_ids"]) == (plain["text"], plain["token_ids"])
        assert "".join(each["text"] for each in told(choice)) == choice["text"]
        assert [each["id"] for each in told(choice)] == choice["token_ids"]
        figures = answer["metrics"]["speculative_decoding"]
        by_source = Counter(each["source"] for each in told(choice))
        assert by_source.total() - by_source.pop("target") == figures["num_accepted_draft_tokens"]
        assert by_source == figures["accepted_by_source"]
        events = stream(both_entries, "/v1/completions", **asked, **SOURCES, stop=stop)
        assert [each["id"] for each in streamed(events)] == choice["token_ids"]


@pytest.mark.parametrize("interval", [None, 1, 4])
def test_events_tell_of_their_own_text(both_entries: HttpService, interval: int | None) -> None:
    asked = {"messages": FOX, "max_tokens": 50, "temperature": 1, "seed": 2, "ignore_eos": True}
    events = stream(both_entries, "/v1/chat/completions", **asked, **SOURCES, stream_interval=interval)
    whole = post(both_entries, "/v1/chat/completions", **asked, n=2, **SOURCES)
    assert content_of(events) == whole["choices"][0]["message"]["content"]
    assert [each["id"] for each in streamed(events)] == [each["id"] for each in told(whole["choices"][0])]
    for choice in whole["choices"]:
        assert "".join(each["text"] for each in told(choice)) == choice["message"]["content"]


@pytest.mark.examples(3)
@pytest.mark.parametrize("tokens", [60, 59, 58])
def test_chunks_and_the_whole_answer_of_the_client(client: Client, tokens: int) -> None:
    asked: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "temperature": 1.0, "seed": 3, "strategy": "blend"}
    for stop in stops_of(client.generate(TEXTS, **asked).text):
        plain = client.generate(TEXTS, **asked, stop=stop)
        assert not plain.origins
        with client.stream(TEXTS, **asked, stop=stop, report="sources") as chunks:
            pieces = list(chunks)
        answer = chunks.result
        assert isinstance(answer, outrider.Generation)
        assert (answer.text, answer.token_ids) == (plain.text, plain.token_ids)
        assert all(len(piece.origins) == len(piece.token_ids) for piece in pieces)
        sources = [each.source for piece in pieces for each in piece.origins]
        assert sources == [each.source for each in answer.origins]
        assert sum(each.text_length for each in answer.origins) == len(answer.text)
        accepted = Counter(source for source in sources if source != "target")
        assert accepted == answer.speculative_decoding.accepted_by_source
        if answer.stop is None:
            # What was told with a token is what it adds; the last one may end within a character.
            assert [each for piece in pieces for each in piece.origins][:-1] == [*answer.origins[:-1]]


@pytest.mark.parametrize("report", ["everything", "", 5])
def test_unknown_reports_are_refused(both_entries: HttpService, client: Client, report: Any) -> None:
    body = {"prompt": "fox", "speculation": {"report": report}}
    error = CLIENT.post(both_entries.url + "/v1/completions", json=body).json()["error"]
    assert error["param"] == "speculation.report"
    with pytest.raises(outrider.InvalidArgument) as refused:
        client.generate("fox", report=report)
    assert refused.value.field in ("speculation.report", "report")


TREES = {"speculation": {"strategy": "blend", "report": "trees"}}


def check_figures(figures: dict[str, Any], passes: Sequence[Any]) -> None:
    """What an answer adds up is what its passes tell, in the shapes that vLLM gives them."""
    drafted, accepted = [len(told["tokens"]) for told in passes], [len(told["accepted"]) for told in passes]
    assert (len(passes), sum(drafted)) == (figures["num_spec_steps"], figures["num_draft_tokens"])
    assert sum(drafted) > 0 and max(drafted) <= figures["num_spec_tokens"]
    assert figures["acceptance_histogram"] == [accepted.count(number) for number in range(figures["num_spec_tokens"] + 1)]
    steps = [*zip(drafted, accepted, strict=True)]
    assert figures["acceptance_histogram_by_draft_length"] == {
        str(length): [steps.count((length, number)) for number in range(length + 1)] for length in {*drafted} - {0}
    }


def check_passes(passes: Sequence[Any], ids: Sequence[int]) -> None:
    """The kept path of each pass, and the token after it, are the answer's tokens."""
    at = 0
    for told in passes:
        path = [told["tokens"][node] for node in told["accepted"]]
        assert path == [*ids[at : at + len(path)]]
        assert told["committed"] - len(path) in (0, 1)
        parents = [-1, *told["accepted"]][: len(path)]
        assert [told["parents"][node] for node in told["accepted"]] == parents
        for nodes in (told, told["dropped"]):
            assert len({len(nodes[name]) for name in ("tokens", "texts", "parents", "sources", "probabilities")}) == 1
        assert told["pass_s"] > 0 and told["wait_s"] >= 0 and told["requests"] >= 1
        assert all(0 <= probability <= 1 for probability in told["probabilities"])
        at += told["committed"]
    assert at == len(ids)


@pytest.mark.parametrize("stopping", [0, 1])
def test_the_paths_of_all_passes_are_the_answer(both_entries: HttpService, client: Client, stopping: int) -> None:
    asked = {**ASKED, "temperature": 0, "return_token_ids": True}
    stop = stops_of(post(both_entries, "/v1/completions", **asked)["choices"][0]["text"])[stopping]
    (plain,) = post(both_entries, "/v1/completions", **asked, stop=stop)["choices"]
    answer = post(both_entries, "/v1/completions", **asked, **TREES, stop=stop)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == plain["token_ids"]
    passes = choice["speculation"]["passes"]
    check_passes(passes, choice["token_ids"])
    check_figures(answer["metrics"]["speculative_decoding"], passes)
    # In events, a pass comes with the first of its tokens.
    events = stream(both_entries, "/v1/completions", **asked, **TREES, stop=stop, stream_interval=3)
    streamed(events)
    in_events = [told for e in events for c in e["choices"] for told in c.get("speculation", {}).get("passes", ())]
    check_passes(in_events, choice["token_ids"])
    end = 0
    for event in events:
        for told in (c["speculation"] for c in event["choices"] if "speculation" in c):
            begun = (
                sum(each["committed"] for each in in_events[: in_events.index(told["passes"][0])]) if told["passes"] else end
            )
            assert end <= begun <= end + len(told["tokens"])
            end += len(told["tokens"])
    # And the same through gRPC.
    whole = client.generate(TEXTS, max_tokens=60, seed=3, ignore_eos=True, strategy="blend", report="trees", stop=stop)
    assert whole.token_ids == tuple(plain["token_ids"])
    check_passes([asdict(told) for told in whole.passes], whole.token_ids)
    texts = [text for told in whole.passes for text in told.texts]
    assert texts and all(isinstance(text, str) and text for text in texts)
