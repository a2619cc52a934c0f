"""Whether what a client gave its user is what plain HTTP gives."""

from __future__ import annotations

import json
from typing import Any

from tests.clients.plain_http import Plain, ask_again
from tests.clients.recorder import Asked

# Of each, whether the client's own words about it, which the server must have been sent, are there.
FEATURES = ("default", "stream", "tools", "structured")


def judge(server: str, feature: str, told: dict[str, Any] | None, asked: list[Asked]) -> str | None:
    """Why a feature failed, in a line; None: it did not.

    Args:
        told: what the client printed; None: nothing.
        asked: what the server was asked for.
    """
    if refused := [each for each in asked if each.status != 200]:
        return f"the server refused it: {refused[0].refusal[:300]}"
    if told is None:
        return "the client ended, or hung, without an answer"
    if "error" in told:
        return str(told["error"]).splitlines()[0][:300]
    if not asked:
        return "the server was not asked"
    try:
        _JUDGES[feature](server, told["gave"], asked)
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return None


def _default(server: str, gave: Any, asked: list[Asked]) -> None:
    _same_text(gave, ask_again(server, asked[-1]))


def _stream(server: str, gave: Any, asked: list[Asked]) -> None:
    assert asked[-1].body.get("stream") is True, "no stream was asked for"
    assert len([piece for piece in gave if piece]) > 2, f"{len(gave)} pieces"
    _same_text("".join(gave), ask_again(server, asked[-1]))


def _tools(server: str, gave: Any, asked: list[Asked]) -> None:
    first = next(each for each in asked if each.body.get("tools"))
    plain = ask_again(server, first)
    assert gave == plain.calls[0], f"{gave} is not {plain.calls[0]}"
    assert gave["name"].endswith("weather") and gave["arguments"] == {"city": "Paris"}, gave


def _structured(server: str, gave: Any, asked: list[Asked]) -> None:
    assert gave.keys() == {"colour", "warm"} and gave["colour"] in ("red", "green", "blue"), gave
    assert isinstance(gave["warm"], bool), gave
    plain = ask_again(server, asked[-1])
    expected = plain.calls[0]["arguments"] if plain.calls else json.loads(plain.text)
    assert gave == expected, f"{gave} is not {expected}"


def _same_text(gave: str, plain: Plain) -> None:
    assert plain.text, "plain HTTP gave no text"
    assert gave == plain.text, f"{gave!r} is not {plain.text!r}"


_JUDGES = {"default": _default, "stream": _stream, "tools": _tools, "structured": _structured}
