"""Grammars of calls: each form's grammar takes what its reader reads, and refuses what the tools' schemas do."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.api.http.openai import tagged_grammar, tool_grammar
from services.api.http.openai.errors import Refused
from services.api.http.openai.prompt_thought import behind_thought
from services.api.http.openai.tool_choice import ToolUse
from services.api.messages import RequestedSampling
from services.api.model_card import ModelCard
from services.structured_outputs.checks import check_sampling
from services.structured_outputs.grammars import engine_text, schema_rule
from services.tool_formats.catalogue import FORMATS, NAMES, THOUGHTS
from services.tool_formats.harmony import MARKS
from services.tool_formats.marks import Marks
from speculation.types import SamplingParams, StructuredOutputs
from tests.running.refusals import refuses
from tests.servers.scripted_router import CARD
from tests.unit.api.test_answer_text import WRITTEN

LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {"look": LOOK, "f": {"type": "object", "properties": {}, "additionalProperties": False}}
STRICT = {name: f"tools[{index}].function.strict" for index, name in enumerate(SCHEMAS)}
FORMED = tuple(name for name in NAMES if name == "harmony" or FORMATS[name](Marks()).shape is not None)


class Bytes:
    """A tokenizer of bytes, and of marks."""

    def __init__(self, marks: tuple[str, ...], *, special: bool) -> None:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.tokenizer = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(letters)}, merges=[]))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens(["<|eos|>"])
        self.tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
        added = {token.content: number for number, token in self.tokenizer.get_added_tokens_decoder().items()}
        self.engine = LLTokenizer(self.tokenizer.to_str(), eos_token=added["<|eos|>"])
        self.card = ModelCard(
            **{
                name: getattr(CARD, name)
                for name in ("name", "max_model_len", "vocab_size", "strategies", "default_strategy")
            },
            bit_exact=True,
            added_tokens=added,
            special_tokens=added if special else {},
        )

    def takes(self, form: StructuredOutputs, text: str, *, spelt: bool = False) -> bool:
        """Whether a form takes a whole answer. ``spelt``: marks in single letters."""
        check_sampling(SamplingParams(max_tokens=1, structured_outputs=form))
        matcher = LLMatcher(self.engine, engine_text(form), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if spelt:
            letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
            ids = [self.tokenizer.token_to_id(each) for each in letters]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def marks_of(form: str) -> tuple[str, ...]:
    return MARKS if form == "harmony" else FORMATS[form](Marks()).marks


def written(form: str) -> tuple[str, str]:
    """A call of each tool, behind the prompt's end."""
    first, second = WRITTEN[form]
    begun = "<|start|>assistant"
    # Ends the answer as a token of its own.
    return first.removeprefix(begun).removesuffix("<|call|>"), second.removeprefix(begun).removesuffix("<|call|>")


def form_of(form: str, tokens: Bytes, **how: Any) -> StructuredOutputs:
    use = ToolUse(mode="auto", shown="[]", schemas=SCHEMAS, **{"strict": STRICT, **how})
    found = use.form_within(replace_format(tokens.card, form))
    assert found is not None
    return found


def replace_format(card: ModelCard, form: str) -> ModelCard:
    return replace(card, tool_format=form)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("form", FORMED)
def test_a_form_takes_what_follows_the_schemas(form: str, special: bool) -> None:
    tokens = Bytes(marks_of(form), special=special)
    strict = form_of(form, tokens)
    text = "" if form == "harmony" else "Just text, { and [ and <tool."
    assert tokens.takes(strict, text) is (form != "harmony")
    for call in written(form):
        # As models of this form were not taught, they need not be able to.
        if "[CALL_ID]" in call or (form == "mistral" and '"id"' in call):
            continue
        assert tokens.takes(strict, call), call
        for wrong in (call.replace("7", '"7x"').replace("\n7\n", "\nx\n"), call.replace("look", "nobody")):
            assert wrong == call or not tokens.takes(strict, wrong), wrong
    if not special and form not in ("harmony", "mistral", "mistral_args"):
        # The letters of a mark are the mark, and begin a call as it does.
        assert tokens.takes(strict, written(form)[1], spelt=True)
        assert not tokens.takes(strict, written(form)[0].replace("look", "nobody"), spelt=True)


@pytest.mark.parametrize("form", [name for name in FORMED if name not in ("harmony", "llama_json")])
def test_one_call_or_several(form: str) -> None:
    tokens = Bytes(marks_of(form), special=False)
    call = written(form)[1].replace("[CALL_ID]abcdef123", "")
    twice = f"Look: {call}\n{call}"
    assert tokens.takes(form_of(form, tokens), twice)
    assert not tokens.takes(form_of(form, tokens, several=False), twice)
    assert tokens.takes(form_of(form, tokens, several=False), f"Look: {call}")


def test_what_is_not_strict_may_be_anything() -> None:
    for form, call in (
        ("hermes", '<tool_call>{"name": "look", "arguments": {"b": [1]}}</tool_call>'),
        ("function_tags", "<tool_call>\n<function=look>\n<parameter=b>\n[1]\n</parameter>\n</function>\n</tool_call>"),
    ):
        tokens = Bytes(marks_of(form), special=False)
        assert tokens.takes(form_of(form, tokens, strict={"f": "tools[1].function.strict"}), call)
        assert not tokens.takes(form_of(form, tokens), call)


EITHER: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
TAGGED: list[tuple[dict[str, Any], str, bool]] = [
    ({"type": "string", "enum": ["on", "off"]}, "on", True),
    ({"type": "string", "enum": ["on", "off"]}, "up", False),
    (EITHER, "any < text\nof lines", True),
    ({"type": "boolean"}, "true", True),
    ({"type": "boolean"}, "maybe", False),
    ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", True),
    ({"type": "array", "items": {"type": "integer"}}, '["1"]', False),
    ({"$ref": "#/$defs/deep"}, '{"x": 1}', True),
    ({"$ref": "#/$defs/deep"}, '{"y": 1}', False),
]


@pytest.mark.parametrize(("schema", "value", "taken"), TAGGED)
def test_arguments_between_tags_follow_their_schemas(schema: dict[str, Any], value: str, taken: bool) -> None:
    tokens = Bytes(marks_of("function_tags"), special=False)
    deep = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
    tool = {"type": "object", "properties": {"v": schema}, "required": ["v"], "$defs": {"deep": deep}}
    use = ToolUse(mode="auto", shown="[]", schemas={"f": tool}, strict={"f": "tools[0].function.strict"})
    form = use.form_within(replace_format(tokens.card, "function_tags"))
    assert form is not None
    call = f"<tool_call>\n<function=f>\n<parameter=v>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert tokens.takes(form, call) is taken


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "object", "properties": {"v": {"type": "string", "minLength": 3}}},
        {"type": "object", "properties": {"v": {}}},
        {"type": "object", "properties": {}, "minProperties": 1},
        {"type": "object", "properties": {}, "required": ["v"]},
        {"type": "object", "properties": {"v": {"type": "string", "anyOf": 5}}},
        {"type": "object", "properties": {"v": {"type": "string", "anyOf": [False]}}},
        {"type": "object", "properties": {"v": {**EITHER, "oneOf": [{"type": "string", "minLength": 3}]}}},
        {"type": "object", "properties": {"v": {"type": "string"}}, "required": 5},
        {"type": "object", "properties": {"v": {"type": "string"}}, "required": [{}]},
        {"type": "array"},
    ],
)
def test_what_no_grammar_of_tags_holds_is_refused(tool: dict[str, Any]) -> None:
    tokens = Bytes(marks_of("function_tags"), special=False)
    use = ToolUse(mode="auto", shown="[]", schemas={"f": tool}, strict={"f": "tools[0].function.strict"})
    with refuses(Refused, field="tools[0].function.strict", value=True):
        use.form_within(replace_format(tokens.card, "function_tags"))


@pytest.mark.parametrize("form", ["function_tags", "hermes"])
def test_a_grammar_is_written_no_longer_than_it_may_be(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments between tags each repeat their tool's definitions."""
    seen = []

    def rule(schema: dict[str, Any], asking: object) -> str:
        seen.append(schema_rule(schema))
        return seen[-1]

    monkeypatch.setattr(tool_grammar, "schema_rule", rule)
    monkeypatch.setattr(tagged_grammar, "schema_rule", rule)
    tokens = Bytes(marks_of(form), special=False)
    deep = {"type": "object", "properties": {f"name{number}": {"type": "integer"} for number in range(800)}}
    tool = {
        "type": "object",
        "properties": {f"v{number}": {"type": "integer"} for number in range(50)},
        "$defs": {"d": deep},
    }
    tools = {f"f{number}": tool for number in range(50)}
    strict = dict.fromkeys(tools, "tools[0].function.strict")
    with refuses(Refused, field="tools"):
        ToolUse(mode="auto", shown="[]", schemas=tools, strict=strict).form_within(replace_format(tokens.card, form))
    assert 2 <= len(seen) < 5


def test_calls_in_python_have_no_grammar() -> None:
    card = replace_format(Bytes((), special=False).card, "pythonic")
    use = ToolUse(mode="auto", shown="[]", schemas=SCHEMAS, strict=STRICT)
    with refuses(Refused, field="tools[0].function.strict", value=True):
        use.form_within(card)
    with refuses(Refused, field="parallel_tool_calls", value=False):
        ToolUse(mode="auto", shown="[]", schemas=SCHEMAS, several=False).form_within(card)


FORMS: list[tuple[StructuredOutputs, str, str]] = [
    (StructuredOutputs(kind="json", text=json.dumps(LOOK)), '{"a": "b"}', '{"b": 1}'),
    (StructuredOutputs(kind="json_object"), "{}", "[]"),
    (StructuredOutputs(kind="regex", text="[a-c]+/\\/d"), "abc//d", "x"),
    (StructuredOutputs(kind="choice", text='["yes", "no"]'), "yes", "maybe"),
    (StructuredOutputs(kind="grammar", text='start: "x" start_more\nstart_more: /[a-c]+/'), "xab", "ab"),
]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("form", "right", "wrong"), FORMS, ids=[form.kind for form, *_ in FORMS])
def test_a_form_holds_for_the_answer_and_not_for_the_thought(
    form: StructuredOutputs, right: str, wrong: str, special: bool
) -> None:
    for thoughts in ("think", "harmony"):
        marks = MARKS if thoughts == "harmony" else THOUGHTS[thoughts]
        tokens = Bytes(marks, special=special)
        card = replace(tokens.card, thoughts=thoughts)
        begin, end = ("<think>", "</think>\n\n")
        if thoughts == "harmony":
            begin = "<|channel|>analysis<|message|>"
            end = "<|end|><|start|>assistant<|channel|>final<|message|>"
        for thinking in (False, True) if thoughts == "think" else (False,):
            held = behind_thought(RequestedSampling(structured_outputs=form), card, thinking=thinking).structured_outputs
            assert held is not None
            begun = "" if thinking else begin
            assert tokens.takes(held, f"{begun}hm, {{ 京{end}{right}")
            assert not tokens.takes(held, f"{begun}hm{end}{wrong}")
        without = right if thoughts == "think" else f"<|channel|>final<|message|>{right}"
        held = behind_thought(RequestedSampling(structured_outputs=form), card, thinking=False).structured_outputs
        assert held is not None and tokens.takes(held, without)
    assert behind_thought(RequestedSampling(structured_outputs=form), CARD, thinking=False).structured_outputs == form
