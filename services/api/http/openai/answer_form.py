"""A body's ``response_format`` and ``structured_outputs``: the form that an answer must have."""

from __future__ import annotations

import json
from typing import Any

from typing_extensions import override

from services.api.http.openai.errors import Refused
from services.api.http.openai.field_rules import take_unhonoured
from services.api.http.openai.fields import Fields
from services.api.http.openai.protocol import parts
from speculation.errors import InvalidArgument
from speculation.types import StructuredOutputs

_KINDS = ("json", "json_object", "regex", "choice", "grammar")


def read_form(fields: Fields) -> tuple[StructuredOutputs | None, str]:
    """The form, and the field that holds it; None: any text.

    Raises:
        Refused: it is not valid, or both fields ask for one.
    """
    named = {kind: fields.take(f"guided_{kind}") for kind in _KINDS}
    if named["json_object"] is False:
        del named["json_object"]
    older = _Guided({kind: value for kind, value in named.items() if value is not None}, parts.StructuredOutputs)
    guided = _one_form(fields, older) if any(older.given(kind) for kind in _KINDS) else None
    (formatted, field), structured = _response_format(fields), _structured_outputs(fields)
    if guided is not None:
        if formatted is not None or structured is not None:
            raise older.refuse(guided.kind, "set", "unset where another field asks for a form, too")
        return guided, older.name(guided.kind)
    if formatted is not None and structured is not None:
        raise fields.refuse("structured_outputs", "set", "unset where response_format asks for a form, too")
    if formatted is not None:
        return formatted, field
    return structured, "" if structured is None else f"structured_outputs.{structured.kind}"


def _format_field(form: StructuredOutputs) -> str:
    """What ``response_format`` calls its form."""
    return "response_format.json_schema.schema" if form.text else "response_format"


def _response_format(fields: Fields) -> tuple[StructuredOutputs | None, str]:
    """The form, and the field that holds it."""
    given = fields.below("response_format", parts.ResponseFormat)
    if given is None:
        return None, ""
    kind = given.one_of("type")
    if kind is None:
        raise given.refuse("type", "unset", "one of text, json_object, json_schema", "missing_required_parameter")
    form, field = None, given.name("schema")
    schema = None if kind == "text" else given.mapping("schema")
    if kind == "json_object" and not schema:
        # One that allows anything is none: the answer is an object all the same.
        schema = None
    if schema is not None:
        form = schema_form(schema, field)
    elif kind == "json_object":
        form = StructuredOutputs(kind="json_object")
    elif kind == "json_schema":
        form = _json_schema(given)
    for name in ("json_schema", "schema"):
        if given.take(name) is not None:
            raise given.refuse(
                name, "set", "unset where schema is set" if schema is not None else f"unset where type is {kind}"
            )
    given.end()
    return form, field if schema is not None or form is None else _format_field(form)


def _json_schema(fields: Fields) -> StructuredOutputs:
    below = fields.below("json_schema", parts.SchemaForm)
    if below is None:
        raise fields.refuse("json_schema", "unset", "an object", "missing_required_parameter")
    if not below.text("name"):
        raise below.refuse("name", "unset", "a name of 1 to 64 characters", "missing_required_parameter")
    below.text("description")
    # A schema is always followed: strict asks for no more.
    below.truth("strict")
    schema = below.mapping("schema")
    if schema is None:
        raise below.refuse("schema", "unset", "a JSON schema", "missing_required_parameter")
    below.end()
    return schema_form(schema, below.name("schema"))


def schema_form(schema: Any, field: str) -> StructuredOutputs:
    """The form of answers that follow a JSON schema.

    Raises:
        Refused: it is too long; names ``field``.
    """
    try:
        return StructuredOutputs(kind="json", text=json.dumps(schema, ensure_ascii=False))
    except InvalidArgument as error:
        raise Refused(field, error.value, error.allowed) from error


class _Guided(Fields):
    """The fields of ``structured_outputs`` by the names that vLLM once had for them."""

    @override
    def name(self, key: str) -> str:
        return f"guided_{key}"


def _structured_outputs(fields: Fields) -> StructuredOutputs | None:
    given = fields.below("structured_outputs", parts.StructuredOutputs)
    return None if given is None else _one_form(fields, given)


def _one_form(fields: Fields, given: Fields) -> StructuredOutputs:
    """The one form that ``given`` asks for; ``fields`` refuses what is none."""
    found: list[StructuredOutputs] = []
    schema = given.take("json")
    if schema is not None:
        if not isinstance(schema, dict | str):
            raise given.refuse("json", schema, "a JSON schema, or its text", "invalid_type")
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        found.append(StructuredOutputs(kind="json", text=text))
    if given.truth("json_object"):
        found.append(StructuredOutputs(kind="json_object"))
    for kind in ("regex", "grammar"):
        text_given = given.text(kind)
        if text_given is not None:
            found.append(StructuredOutputs(kind="regex" if kind == "regex" else "grammar", text=text_given))
    if (choices := given.listed("choice")) is not None:
        if not choices or not all(isinstance(text, str) and text for text in choices):
            raise given.refuse("choice", choices, "a list of texts, at least one and none of them empty")
        found.append(StructuredOutputs(kind="choice", text=json.dumps(choices, ensure_ascii=False)))
    take_unhonoured(given, parts.StructuredOutputs)
    given.end()
    if len(found) != 1:
        raise fields.refuse("structured_outputs", f"{len(found)} forms", f"one of {', '.join(_KINDS)}")
    return found[0]
