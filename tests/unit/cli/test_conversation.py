"""A conversation on the command line: what is sent with each line, and what its commands do."""

from __future__ import annotations

from typing import Any

import pytest

import outrider
from cli import conversation
from cli.conversation import Conversation


class Asked:
    """A client that keeps what it is asked, and refuses the strategy "wrong"."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    def stream(self, **request: Any) -> Any:
        self.requests.append(request)
        return request


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Any:
    def answer(request: dict[str, Any], as_json: bool, *, sources: bool) -> Any:
        if request.get("strategy") == "wrong":
            raise outrider.InvalidArgument("strategy is wrong")
        if contents(request)[-1] == "for ever":
            raise KeyboardInterrupt
        result: Any = outrider.Generation.__new__(outrider.Generation)
        object.__setattr__(result, "text", f"answer {len(request['messages'])}")
        return result

    monkeypatch.setattr(conversation, "print_answer", answer)

    def run(*lines: str) -> list[dict[str, Any]]:
        asked: Any = Asked()
        rest = iter(lines)

        def read() -> str:
            try:
                return next(rest)
            except StopIteration:
                raise EOFError from None

        Conversation(asked, [{"role": "system", "content": "be kind"}], {"max_tokens": 9}, read).run()
        return asked.requests

    return run


def contents(request: dict[str, Any]) -> list[str]:
    return [message["content"] for message in request["messages"]]


def test_each_line_is_sent_with_what_was_said_before(said: Any) -> None:
    first, second, third = said("one", "", "two", "/new", "three", "/quit", "never")
    assert contents(first) == ["be kind", "one"]
    assert contents(second) == ["be kind", "one", "answer 2", "two"]
    assert contents(third) == ["be kind", "three"]
    assert all(request["max_tokens"] == 9 for request in (first, second, third))


def test_commands_change_what_follows(said: Any) -> None:
    first, second, third = said("/strategy blend", "/seed 7", "one", "/seed", "two", "/seed seven", "/strategy", "three")
    assert (first["strategy"], first["seed"]) == ("blend", 7)
    assert "seed" not in second and "seed" not in third
    assert third["strategy"] == "blend"
    (asked,) = said(f"/seed {'7' * 5000}", "one")
    assert "seed" not in asked


def test_an_answer_is_stopped_and_the_conversation_goes_on(said: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, stopped, answered = said("one", "for ever", "two")
    assert contents(stopped) == ["be kind", "one", "answer 2", "for ever"]
    assert contents(answered) == ["be kind", "one", "answer 2", "two"]
    assert "stopped: this question and its answer are forgotten" in capsys.readouterr().err


def test_a_request_that_fails_is_not_remembered(said: Any, capsys: pytest.CaptureFixture[str]) -> None:
    refused, answered = said("/strategy wrong", "one", "/strategy auto", "two")
    assert contents(refused) == ["be kind", "one"]
    assert contents(answered) == ["be kind", "two"]
    assert "strategy is wrong" in capsys.readouterr().err
