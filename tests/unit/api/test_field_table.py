"""The declared bodies: every field that is read is declared and the other way round, both take the same values, and the page of
fields is theirs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from services.api.http.declared import schema_of
from services.api.http.openai import field_rules, field_table
from services.api.http.openai.chat_request import read_chat
from services.api.http.openai.completion_request import read_completion
from services.api.http.openai.fields import Fields
from services.api.http.openai.other_servers import asks_for_nothing
from services.api.http.openai.protocol.chat_body import ChatBody
from services.api.http.openai.protocol.completion_body import CompletionBody
from services.api.http.openai.protocol.marks import declared_fields
from services.api.http.openai.protocol.token_bodies import DetokenizeBody, TokenizeBody
from services.api.http.openai.token_requests import read_detokenize, read_tokenize
from services.api.http.responses.chat_body import read_create
from services.api.http.responses.protocol import CreateResponse
from services.api.http.responses.unserved import HINTS as OF_RESPONSES
from speculation.errors import InvalidArgument

PAGE = Path(__file__).parents[3] / "docs" / "openai_fields.md"
CHAT = {"messages": [{"role": "user", "content": "a"}]}
READ = [
    (read_chat, CHAT, ChatBody),
    (read_completion, {"prompt": "a"}, CompletionBody),
    (read_tokenize, CHAT, TokenizeBody),
    (read_detokenize, {"tokens": [1]}, DetokenizeBody),
]


def test_the_page_is_fresh() -> None:
    again = "python -m services.api.http.openai.field_table > docs/openai_fields.md"
    assert PAGE.read_text() == field_table.page(), f"write it with: {again}"


@pytest.mark.parametrize(("read", "body", "declared"), READ)
def test_every_field_that_is_read_is_declared(
    monkeypatch: pytest.MonkeyPatch, read: Any, body: dict[str, Any], declared: type[BaseModel]
) -> None:
    taken: set[str] = set()
    plain = Fields.take

    def noted(self: Fields, key: str) -> Any:
        taken.update([key] if self.name(key) == key else [])
        return plain(self, key)

    monkeypatch.setattr(Fields, "take", noted)
    read(body)
    # A conversation is read in place of a prompt.
    other = {"prompt"} if read is read_tokenize else set()
    assert taken | other == {name for name, _ in declared_fields(declared)}


# Letters that mean something to a reader somewhere, and some that do not.
TEXTS = st.text(alphabet="a 7\n\x7fé", max_size=4)
NUMBERS = st.one_of(
    st.sampled_from(
        [-1, 0, 1, 2, 1.0, 0.5, -0.0, 1e-9, 16, 17, 20, 21, 512, 513, 2**31, 2**63, 2**64 - 1, 2**64, -(2**63) - 1]
    ),
    st.integers(-200, 200),
    st.floats(-200, 200),
)
WORDS = st.sampled_from(
    ["text", "json_object", "json_schema", "function", "none", "auto", "required", "default", "medium", "left", "strict", "walk",
     "rejection", "trees", "in_memory", "content", "user", "assistant", "tool", "17", "x" * 65, "x" * 257, "x" * 513]
)  # fmt: skip
PLAIN = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, WORDS)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | WORDS, inner, max_size=2),
    max_leaves=6,
)
# Rules between fields, and on what is said in other languages (schemas, grammars): no schema of one field has them.
BETWEEN = {
    "response_format": "json_schema",
    "structured_outputs": "exactly one",
    "continue_final_message": "the last message",
    "top_logprobs": "logprobs",
    "best_of": "n",
    "tool_choice": "tools",
    "add_special_tokens": "messages or a prompt",
    "prompt": "messages",
    "messages": "roles",
}


def near(schema: dict[str, Any], root: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of a schema's own form, with anything in places."""
    if "$ref" in schema:
        return near(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return st.one_of(*(near(each, root) for each in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return st.lists(mostly(schema["items"], root), max_size=3)
    if "properties" in schema:
        known = {name: mostly(each, root) for name, each in schema["properties"].items()}
        needed = {name: known[name] for name in schema.get("required", [])}
        return st.fixed_dictionaries(needed, optional={name: each for name, each in known.items() if name not in needed})
    if schema.get("type") == "object":
        return st.dictionaries(
            TEXTS | st.sampled_from(["7", "07"]), mostly(schema.get("additionalProperties") or {}, root), max_size=2
        )
    return {"string": TEXTS, "boolean": st.booleans(), "null": st.none()}.get(schema.get("type", ""), NUMBERS)


def mostly(schema: dict[str, Any], root: dict[str, Any]) -> st.SearchStrategy[Any]:
    if not isinstance(schema, dict):
        return VALUES
    return st.one_of(near(schema, root), near(schema, root), near(schema, root), VALUES)


def reads(read: Callable[[dict[str, Any]], Any], body: dict[str, Any]) -> str | None:
    """The field that a reader refuses; None: it takes the body."""
    try:
        read(body)
    except InvalidArgument as error:
        return error.field
    return None


def declares(declared: type[BaseModel], body: dict[str, Any]) -> str | None:
    try:
        declared.model_validate(body)
    except ValidationError as error:
        return str(error)
    return None


def one_field(declared: type[BaseModel]) -> st.SearchStrategy[tuple[str, Any]]:
    schema = schema_of(declared)
    return st.one_of(*(st.tuples(st.just(name), mostly(each, schema)) for name, each in schema["properties"].items()))


@pytest.mark.examples(2)
@pytest.mark.parametrize(("read", "body", "declared"), READ)
def test_what_is_declared_is_what_is_taken(read: Any, body: dict[str, Any], declared: type[BaseModel]) -> None:
    @settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(one_field(declared))
    def alike(given: tuple[str, Any]) -> None:
        name, value = given
        tried = {**body, name: value}
        refused, undeclared = reads(read, tried), declares(declared, tried)
        # What is declared may be more where a rule is between fields, but not less.
        if refused is None or name not in BETWEEN:
            assert (refused is None) == (undeclared is None), (name, value, refused, undeclared)

    alike()


SAYS = re.compile(r"(?:say|or) (?!it to|use )([a-z_]+)(?:\.([a-z_]+))?")
DOORS: list[tuple[Callable[[dict[str, Any]], Any], dict[str, Any], type[BaseModel], dict[str, str]]] = [
    (read_chat, CHAT, ChatBody, field_rules.HINTS),
    (read_completion, {"prompt": "a"}, CompletionBody, field_rules.OF_COMPLETIONS),
    (read_create, {"input": "a"}, CreateResponse, OF_RESPONSES),
]


@pytest.mark.parametrize(("read", "body", "declared", "hints"), DOORS, ids=["chat", "completions", "responses"])
@pytest.mark.parametrize("name", sorted({*field_rules.HINTS, *OF_RESPONSES}))
def test_fields_of_other_servers_are_refused_with_one_that_there_is(
    name: str, read: Any, body: dict[str, Any], declared: type[BaseModel], hints: dict[str, str]
) -> None:
    if name not in hints:
        return
    asking = {**body, name: "asked"}
    if asks_for_nothing(name, "asked", body):
        assert read(asking) == read(body)
        return
    if name == "samplers" and read is not read_create:
        assert [(each.field, each.allowed) for each in read(asking).left_out] == [(name, hints[name])]
        return
    with pytest.raises(InvalidArgument) as refused:
        read(asking)
    assert (refused.value.field, refused.value.allowed) == (name, hints[name])
    # What is said in its place is a field of the same body, or tells of one.
    schema = schema_of(declared)
    for field, within in SAYS.findall(hints[name]):
        assert field in schema["properties"] or field == "each", hints[name]
        # A field within one that is declared there: of an object of any fields, its readers know.
        below = _properties(schema["properties"].get(field, {}), schema)
        assert not within or not below or within in below, hints[name]


def _properties(schema: dict[str, Any], root: dict[str, Any]) -> set[str]:
    """The fields of an object, or of the objects that it may be."""
    if "$ref" in schema:
        return _properties(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    return {*schema.get("properties", {})}.union(*(_properties(each, root) for each in schema.get("anyOf", [])))


def test_a_query_may_name_what_other_servers_have_in_a_body() -> None:
    assert "temperature" in field_table.KNOWN and not field_table.KNOWN & {*field_rules.HINTS}
