"""The arguments of calls: JSON as the model wrote it, between tags, in Python."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.tool_formats.answer_text import AnswerText
from services.tool_formats.marks import Marks
from tests.unit.api.test_answer_text import SECTION, listed, read, read_anyhow

AS_WRITTEN = [
    r'{"x": "\ud83d"}',
    '{"x": 1e999}',
    '{"x": ' + "9" * 5000 + "}",
    '{"x":1.0000000000000000000000001}',
    '{ "x" : "a </tool_call> b" }',
    r'{"x": "\" </tool_call> <tool_call>"}',
    '{"x": "{\\"name\\": \\"f\\", \\"arguments\\": {}}"}',
    "null",
    "[1]",
    '{"x": 1, "x": 2}',
]


@pytest.mark.parametrize("arguments", AS_WRITTEN, ids=range(len(AS_WRITTEN)))
def test_arguments_stay_as_the_model_wrote_them(arguments: str) -> None:
    call = f'{{"name": "f", "arguments": {arguments}}}'
    assert read(f"<tool_call>\n{call}\n</tool_call>", "hermes", cuts=(*range(99),)) == [("call", "f", arguments)]
    assert read(f"[TOOL_CALLS]f[ARGS]{arguments}", "mistral_args", cuts=(*range(99),)) == [("call", "f", arguments)]
    section = SECTION.format(f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>")
    assert read(section, "deepseek_v31", cuts=(*range(99),)) == [("call", "f", arguments)]
    assert listed(f"[{call}, {call}]") == [("f", arguments), ("f", arguments)]


NO_CALLS = [
    '{"name": "f", "arguments": {"x": NaN}}',
    '{"name": "f", "arguments": "{"}',
    # Half of a surrogate pair, in an object that is written as a text: no answer can hold it.
    r'{"name": "f", "arguments": "{\"x\": \"\ud83d\"}"}',
    "[" * 100,
]


@pytest.mark.parametrize("inner", NO_CALLS, ids=range(len(NO_CALLS)))
def test_what_is_no_json_is_no_call(inner: str) -> None:
    text = f"<tool_call>{inner}</tool_call>"
    assert read_anyhow(text, "hermes") == [("text", text)]


TAGGED: list[tuple[str, Any, str]] = [
    ("7", {"type": "string"}, '"7"'),
    ("7", {"type": "integer"}, "7"),
    ("7.50", {"type": "number"}, "7.50"),
    ("True", {"type": "boolean"}, "true"),
    ("None", {"type": ["string", "null"]}, "null"),
    ("seven", {"type": "integer"}, '"seven"'),
    ('{"b": [1]}', {"type": "object"}, '{"b": [1]}'),
    ("[1]", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, '"[1]"'),
    ("yes", {}, '"yes"'),
    ("1", {}, "1"),
    ("1", {"enum": ["1", "2"]}, '"1"'),
    ('a "b"\n<c>', {"type": "string"}, '"a \\"b\\"\\n<c>"'),
]


@pytest.mark.parametrize(("value", "schema", "told"), TAGGED)
def test_arguments_between_tags_become_json_by_their_schema(value: str, schema: Any, told: str) -> None:
    for form, text in (
        ("function_tags", f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"),
        ("key_tags", f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"),
    ):
        reader = AnswerText(Marks(), form=form, schemas={"f": {"type": "object", "properties": {"x": schema}}})
        (part,) = [*reader.push(text), *reader.finish(cut=False)]
        assert part.call is not None and part.call.arguments == f'{{"x": {told}}}'
        json.loads(part.call.arguments)


PYTHON: list[tuple[str, str | None]] = [
    ("x=1, y=-2.5", '{"x": 1, "y": -2.5}'),
    ("x='a)', y=\"it's\"", '{"x": "a)", "y": "it\'s"}'),
    ("x=[1, {'b': None}], y=True, z=false", '{"x": [1, {"b": null}], "y": true, "z": false}'),
    ("x=Bern", '{"x": "Bern"}'),
    ("1", None),
    ("**x", None),
    ("x=__import__('os')", None),
    ("x=1e999, y=1.50", '{"x": 1e999, "y": 1.50}'),
    ("x='a\\n\\'\\u4eac\\d'", '{"x": "a\\n\'京\\\\d"}'),
    ("x='\\ud83d'", '{"x": "\\\\ud83d"}'),
    ("x=1 + 1", None),
    ("x=" + "-" * 9999 + "1", None),
    ("x=1,", '{"x": 1}'),
    ("x=", None),
    ("x=" + "(" * 99 + ")" * 99, None),
]


@pytest.mark.parametrize(("inner", "told"), PYTHON)
def test_arguments_in_python(inner: str, told: str | None) -> None:
    text = f"[f({inner})]"
    assert read_anyhow(text, "pythonic") == [("text", text) if told is None else ("call", "f", told)]
