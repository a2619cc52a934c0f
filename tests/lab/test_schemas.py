"""The benchmark's 500 JSON schemas: all different, valid, honoured by the grammar engine, and of every kind."""

from __future__ import annotations

import json

import jsonschema
import pytest

from lab.schema_maker import Schema, make_schema
from lab.structured import Held, Pair
from services.structured_outputs.checks import check_sampling
from speculation.errors import InvalidArgument
from speculation.types import SamplingParams, StructuredOutputs

pytestmark = pytest.mark.exhaustive

KEYWORDS = (
    "$ref", "$defs", "anyOf", "const", "enum", "pattern", "format", "prefixItems", "items", "minItems", "maxItems", "minLength",
    "maxLength", "minimum", "maximum", "exclusiveMinimum", "multipleOf", "required", "additionalProperties", "properties",
)  # fmt: skip


def check(schema: Schema) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    check_sampling(SamplingParams(structured_outputs=StructuredOutputs(kind="json", text=json.dumps(schema))))


def test_all_are_honoured_and_every_keyword_occurs() -> None:
    made = [make_schema(number) for number in range(500)]
    for schema in made:
        check(schema)
    texts = [json.dumps(schema) for schema in made]
    assert len(set(texts)) >= 490
    assert [json.dumps(make_schema(number)) for number in range(20)] == texts[:20]
    for keyword in KEYWORDS:
        assert sum(f'"{keyword}":' in text for text in texts) >= 20, keyword


def test_a_keyword_that_nothing_honours_is_noticed() -> None:
    with pytest.raises(InvalidArgument):
        check({**make_schema(0), "unevaluatedProperties": False})


@pytest.mark.parametrize(
    ("tokens", "valid", "right"), [((1, 2), True, True), ((1, 2), None, True), ((1, 3), True, False), ((1, 2), False, False)]
)
def test_an_answer_that_differs_or_has_another_form_is_wrong(
    tokens: tuple[int, ...], valid: bool | None, right: bool
) -> None:
    plain = Held(tokens=(1, 2), text="", seconds=2.0, passes=2, by_grammar=0, valid=True)
    drafted = Held(tokens=tokens, text="", seconds=1.0, passes=1, by_grammar=0, valid=valid)
    assert Pair(number=0, plain=plain, drafted=drafted).right is right
