"""System messages behind others, of which some chat templates take none."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from services.api.http.messages.reading import fitted, read_message
from services.api.http.openai.late_system import as_users_text
from services.api.messages import ChatMessage
from services.router.tokens import Tokens
from tests.servers.scripted_router import CARD
from tests.tiny_models.tiny import make_tiny_tokenizer

_STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the "
    "beginning.') }}{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
)


def test_a_template_shows_whether_it_takes_them(tmp_path: Path) -> None:
    make_tiny_tokenizer(tmp_path)
    assert Tokens(str(tmp_path)).conversations.late_system
    (tmp_path / "chat_template.jinja").write_text(_STRICT)
    assert not Tokens(str(tmp_path)).conversations.late_system


def test_they_stay_where_they_are_as_text_of_the_user() -> None:
    turns = [("user", "one"), ("system", "briefly"), ("assistant", "two"), ("system", "slowly"), ("user", "three")]
    messages = [{"role": role, "content": content} for role, content in turns]
    asked = read_message({"max_tokens": 5, "system": "first", "messages": messages})
    strict = fitted(asked, replace(CARD, late_system=False), strict=False)
    assert strict.asked.inputs[0] == (
        ChatMessage(role="system", content="first"),
        ChatMessage(role="user", content="one\n<system>\nbriefly\n</system>"),
        ChatMessage(role="assistant", content="two"),
        ChatMessage(role="user", content="<system>\nslowly\n</system>\nthree"),
    )
    assert strict.paths == ("system", "messages[0].content", "messages[2].content", "messages[3].content")
    assert fitted(asked, CARD, strict=False) == asked


@pytest.mark.parametrize(
    ("first", "parts"), [(ChatMessage(role="system", content="x"), "\n\n"), (ChatMessage(role="user", content="x"), "\n")]
)
def test_many_become_text_in_a_time_that_grows_as_they_do(first: ChatMessage, parts: str) -> None:
    """Written one behind the other, each copied all before it."""
    late = ChatMessage(role="system", content="y" * 300)
    said = late.content if first.role == "system" else f"<system>\n{late.content}\n</system>"
    began = time.perf_counter()
    (turn,), places = as_users_text([first, *[late] * 20_000], range(20_001))
    assert time.perf_counter() - began < 3.0
    assert turn.role == first.role and turn.content == parts.join(["x", *[said] * 20_000]) and places == (0,)
