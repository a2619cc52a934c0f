"""Marks in grammars. A mark that is a token of its own is named by its id, which no text matches, and by its letters, where
those count as well.
"""

from __future__ import annotations

import json

from services.api.model_card import ModelCard


class MarkRules:
    """Makes parts of Lark grammars for one model."""

    def __init__(self, card: ModelCard) -> None:
        self._special = card.special_tokens
        self._added = card.added_tokens

    def is_special(self, mark: str) -> bool:
        """Whether a mark is a special token, which its letters cannot imitate."""
        return mark in self._special

    def mark(self, mark: str) -> str:
        """A mark, or other text."""
        if mark in self._special:
            return f"<[{self._special[mark]}]>"
        if mark in self._added:
            return f"({literal(mark)} | <[{self._added[mark]}]>)"
        return literal(mark)

    def until(self, name: str, mark: str) -> list[str]:
        """Rules for any text that ends with the first ``mark``, as ``name``. ``TEXT`` is a rule of the grammar."""
        spelt = f"{name}_spelt[lazy]: TEXT {literal(mark)}"
        if mark in self._special:
            return [f"{name}: TEXT <[{self._special[mark]}]>"]
        if mark in self._added:
            return [spelt, f"{name}: {name}_spelt | TEXT <[{self._added[mark]}]>"]
        return [spelt, f"{name}: {name}_spelt"]


def literal(text: str) -> str:
    """A text in a grammar."""
    return json.dumps(text, ensure_ascii=False)
