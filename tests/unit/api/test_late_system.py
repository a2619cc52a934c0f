"""System messages behind others, of which some chat templates take none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from services.api.http.messages.reading import fitted, read_message
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
