"""The one table of a body's fields: it has every field that is read, and the page has the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.api.http.openai import field_rules, field_table
from services.api.http.openai.chat_request import read_chat
from services.api.http.openai.completion_request import read_completion
from services.api.http.openai.fields import Fields

PAGE = Path(__file__).parents[2] / "docs" / "openai_fields.md"


def test_the_page_is_fresh() -> None:
    again = "python -m services.api.http.openai.field_table > docs/openai_fields.md"
    assert PAGE.read_text() == field_table.page(), f"write it with: {again}"


@pytest.mark.parametrize(
    ("read", "body", "honoured", "rules"),
    [
        (read_chat, {"messages": [{"role": "user", "content": "a"}]}, field_table.CHAT, field_rules.CHAT),
        (read_completion, {"prompt": "a"}, field_table.COMPLETION, field_rules.COMPLETION),
    ],
)
def test_every_field_that_is_read_is_in_the_table(
    monkeypatch: pytest.MonkeyPatch, read: Any, body: dict[str, Any], honoured: dict[str, str], rules: dict[str, Any]
) -> None:
    taken: set[str] = set()
    plain = Fields.take

    def noted(self: Fields, key: str) -> Any:
        taken.update([key] if self.name(key) == key else [])
        return plain(self, key)

    monkeypatch.setattr(Fields, "take", noted)
    read(body)
    assert taken == {*honoured, *rules}
    assert not {*honoured} & {*rules}
