"""Whoever got a pattern wrong is told in words: each pattern of a setting, or of what a chart offers, has some."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.checks.offered import Offer
from cluster.settings.config import Settings
from services.patterns import WORDS


def patterns(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(found := schema.get("pattern"), str):
            yield found
        for each in schema.values():
            yield from patterns(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from patterns(each)


def test_every_pattern_has_words_and_every_word_its_pattern() -> None:
    used = {*patterns(Settings.model_json_schema()), *patterns(Offer.model_json_schema())}
    assert used == set(WORDS)


@pytest.mark.parametrize(("pattern", "words"), WORDS.items())
def test_an_example_in_the_words_is_one(pattern: str, words: str) -> None:
    examples = words.partition("such as ")[2]
    assert all(re.search(pattern, each) for each in examples.split(" or ") if each)
    # They say it without the signs of an expression.
    assert not re.search(r"\[|\\|\^|\{", words)
