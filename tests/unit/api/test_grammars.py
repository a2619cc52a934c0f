"""What the router says to forms that an answer cannot be held to."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from llguidance import LLMatcher, LLTokenizer

from services.structured_outputs import checks
from services.structured_outputs.checks import check_sampling
from services.structured_outputs.grammars import MAX_CHOICES, engine_text
from services.structured_outputs.json_schemas import AskedPatterns, without_vacuous
from speculation.errors import InvalidArgument
from speculation.limits import MAX_GRAMMAR_CHARACTERS
from speculation.types import GrammarKind, SamplingParams, StructuredOutputs
from tests.running.refusals import refuses
from tests.servers.answer_forms import FORMS, letters


def sampling(kind: GrammarKind, text: str) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputs(kind=kind, text=text))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((form.structured.kind, form.structured.text) for form in FORMS.values()),
        ("json_object", ""),
        ("json", "true"),
        ("json", '{"type": "string", "format": "date-time", "title": "when", "banana": 1}'),
        ("json", '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}'),
        ("json", '{"type": "object", "propertyNames": {}}'),
        ("json", '{"properties": {"a": {"type": "object", "propertyNames": {"type": "string"}}}}'),
        ("regex", ""),
        ("regex", "\\\\"),
        ("grammar", 'start: "temperature=3" | /[a[temperature]]/'),
        ("grammar", "start: <|some_special_token|>"),
        ("grammar", 'start: a\na[stop="temperature"]: /x/'),
    ],
)
def test_what_is_supported(kind: GrammarKind, text: str) -> None:
    check_sampling(sampling(kind, text))


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json", "", "no JSON"),
        ("json", "{", "no JSON"),
        ("json", '{"const": NaN}', "NaN is no JSON"),
        ("json", "[" * 60_000, "no JSON"),
        ("json", "[1]", "an object, or true"),
        ("json", "false", "an object, or true"),
        ("json", '{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
        ("json", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json", '{"not": {}, "x-guidance": {"lenient": true}}', "Unimplemented keys"),
        ("json", '{"type": "string", "format": "nonsense"}', "Unknown format"),
        ("json", '{"$ref": "http://example.org/schema"}', "not present"),
        ("json", '{"type": "integer", "minimum": ' + "9" * 400 + "}", "out of range"),
        ("json", '{"minimum": 1e999}', "out of range"),
        ("json", '{"enum": [' + "9" * 5000 + "]}", "no JSON"),
        ("json", '{"a":' * 150 + "1" + "}" * 150, "recursion limit"),
        ("json", '{"const": "\\ud800"}', "escape"),
        ("json", '{"type": "string", "type": "integer"}', "there twice"),
        ("json", '{"type": "object", "propertyNames": {"pattern": "^a"}}', "propertyNames"),
        ("regex", "\\", "single backslash"),
        ("regex", "a\\\\\\", "single backslash"),
        ("choice", '["\\ud800"]', "surrogates"),
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("choice", "[]", "one or more"),
        ("choice", '["a", ""]', "none of them empty"),
        ("choice", '["a", 1]', "list"),
        ("choice", json.dumps([str(number) for number in range(MAX_CHOICES + 1)]), "at most 1024"),
        ("grammar", "start: nowhere", "unknown name"),
        ("grammar", 'start: a\na[temperature=0.5]: "x"', "temperature"),
        ("grammar", 'start: a\na[stop="x]\\"", temperature=0.5]: /x/', "temperature"),
        ("grammar", "start: a\na[suffix=/]/, temperature=0.5]: /x/", "temperature"),
        ("grammar", ' {"grammars": [{"json_schema": {"x-guidance": {"lenient": true}}}]}', "begins with a rule"),
        ("grammar", 'start: %json {"x-guidance": {"lenient": true}, "not": {}}', "Unimplemented keys"),
    ],
)
def test_what_is_refused_and_how(kind: GrammarKind, text: str, words: str) -> None:
    with refuses(InvalidArgument, f"structured_outputs.{kind}", allowed=words) as caught:
        check_sampling(sampling(kind, text))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("line", ["\n", " ", "a", "a[\n", "a[", 'a["', "a[/", 'a["\\', "?", "a[b \n", "a[temperatur "])
def test_a_grammar_is_searched_in_linear_time(line: str) -> None:
    text = (line * MAX_GRAMMAR_CHARACTERS)[:MAX_GRAMMAR_CHARACTERS]
    began = time.process_time()
    with pytest.raises(InvalidArgument):
        check_sampling(sampling("grammar", text))
    # Quadratic time would be minutes.
    assert time.process_time() - began < 2


def test_the_engines_words_are_clipped_and_freed_of_control_characters() -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_sampling(sampling("regex", "(\x1b[31m\r\n\x00" + "x" * 50_000))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(("name", "value"), [("min_tokens", 2), ("ignore_eos", True)])
def test_an_answer_cannot_go_on_behind_its_end(name: str, value: int) -> None:
    with refuses(InvalidArgument, allowed="an answer ends where its grammar does") as caught:
        check_sampling(SamplingParams(structured_outputs=FORMS["regex"].structured, **{name: value}))  # type: ignore[arg-type]
    assert caught.value.field == name


@pytest.mark.parametrize("choice", ['say "x"\\', "new\nline", "\u2028\x07", "東京", "a.b*[c]", "/r/", "%json", "|"])
def test_a_choice_is_taken_literally(choice: str) -> None:
    tokenizer, _ = letters(*"".join(dict.fromkeys(choice + "zy")))
    structured = StructuredOutputs(kind="choice", text=json.dumps([choice, "zy"]))
    matcher = LLMatcher(tokenizer, engine_text(structured), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    assert matcher.try_consume_tokens(tokenizer.tokenize_str(choice)) == len(choice)
    assert matcher.is_accepting()


def test_white_space_comes_to_an_end_and_a_schema_may_have_none() -> None:
    tokenizer, _ = letters("{", "}", " ")
    for options, most in (({}, 20), ({"x-guidance": {"whitespace_flexible": False}}, 0)):
        text = json.dumps({"type": "object", "additionalProperties": False, **options})
        matcher = LLMatcher(tokenizer, engine_text(StructuredOutputs(kind="json", text=text)), log_level=0)
        assert matcher.try_consume_tokens([0, *[2] * 100]) == 1 + most


@pytest.mark.parametrize(
    ("names", "patterns", "kept"),
    [
        (["id"], ["^id$"], []),
        (["id"], ["^id$", "^x"], ["^x"]),
        (["a", "b"], ["^[ab]$", "^(a|b)$", "^[abc]$"], ["^[abc]$"]),
        (["a"], ["a"], ["a"]),
        (["a$"], ["^a\\$"], ["^a\\$"]),
        ([], ["^a$"], ["^a$"]),
    ],
)
def test_patterns_of_names_that_are_all_declared_are_left_out(
    names: list[str], patterns: list[str], kept: list[str]
) -> None:
    schema = {"properties": {name: {} for name in names}, "patternProperties": {pattern: {} for pattern in patterns}}
    assert list(without_vacuous({"items": schema})["items"].get("patternProperties", {})) == kept


def test_a_pattern_beside_its_own_names_leads_nowhere_no_more() -> None:
    schema = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
    schema |= {"patternProperties": {"^id$": {}}, "additionalProperties": False}
    matcher = LLMatcher(LLTokenizer("byte"), engine_text(StructuredOutputs(kind="json", text=json.dumps(schema))))
    assert matcher.try_consume_tokens(list(b'{"id":5,')) == len(b'{"id":5')


def test_of_many_patterns_beside_names_some_are_looked_at() -> None:
    patterns = {f"^{'(' * number}a{')' * number}$": {} for number in range(100)}
    schema = {"properties": {"a": {}}, "patternProperties": patterns}
    kept = without_vacuous(schema)["patternProperties"]
    assert 50 < len(kept) < 100
    # All schemas of a request together.
    asked = AskedPatterns()
    found = [without_vacuous(schema, asked) for _ in range(5)]
    assert found == [{**schema, "patternProperties": kept}, *[schema] * 4]


def test_choices_of_one_form_have_it_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    def engine_text_of(structured: StructuredOutputs) -> str:
        checked.append(structured.text)
        return engine_text(structured)

    monkeypatch.setattr(checks, "engine_text", engine_text_of)
    for _ in range(3):
        check_sampling(sampling("regex", "checked-once"))
        with pytest.raises(InvalidArgument):
            check_sampling(sampling("regex", "(checked-often"))
        # Its companions may differ.
        with pytest.raises(InvalidArgument, match="min_tokens"):
            check_sampling(replace(sampling("regex", "checked-once"), min_tokens=2))
    assert checked == ["checked-once", *["(checked-often"] * 3]
