"""Thoughts, text and calls in what models write: every form, cut anywhere, cut short, broken, imitated."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.api.http.openai.forced_calls import ListedCalls
from services.tool_formats.answer_text import AnswerText
from services.tool_formats.catalogue import FORMATS, NAMES, THOUGHTS
from services.tool_formats.harmony import MARKS
from services.tool_formats.json_calls import long_id
from services.tool_formats.marks import Marks

SCHEMAS: dict[str, Any] = {
    "look": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "o": {}}},
    "f": {},
}
Said = list[tuple[str, ...]]
SECTION = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
HARMONY_END = "<|start|>assistant<|channel|>final<|message|>done<|return|>"

# Of each form: how it writes a call of look with a text and a whole number, and one of f without arguments.
WRITTEN: dict[str, tuple[str, str]] = {
    "hermes": (
        '<tool_call>\n{"name": "look", "arguments": {"a": "京 </b>", "n": 7}}\n</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    ),
    "function_tags": (
        "<tool_call>\n<function=look>\n<parameter=a>\n京 </b>\n</parameter>\n<parameter=n>\n7\n</parameter>\n</function>\n"
        "</tool_call>",
        "<tool_call>\n<function=f>\n</function>\n</tool_call>",
    ),
    "key_tags": (
        "<tool_call>look\n<arg_key>a</arg_key>\n<arg_value>京 </b></arg_value>\n<arg_key>n</arg_key>\n<arg_value>7</arg_value>\n"
        "</tool_call>",
        "<tool_call>f\n</tool_call>",
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "look", "arguments": {"a": "京 </b>", "n": 7}, "id": "abcdef123"}]',
        '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
    ),
    "mistral_args": (
        '[TOOL_CALLS]look[ARGS]{"a": "京 </b>", "n": 7}',
        "[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{}",
    ),
    "deepseek_v3": (
        SECTION.format(
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"a": "京 </b>", "n": 7}\n```<｜tool▁call▁end｜>'
        ),
        SECTION.format("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"),
    ),
    "deepseek_v31": (
        SECTION.format('<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"a": "京 </b>", "n": 7}<｜tool▁call▁end｜>'),
        SECTION.format("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    ),
    "kimi_k2": (
        KIMI.format(
            '<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"a": "京 </b>", "n": 7}<|tool_call_end|>'
        ),
        KIMI.format("<|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    ),
    "phi4": (
        '<|tool_call|>[{"name": "look", "arguments": {"a": "京 </b>", "n": 7}}]<|/tool_call|>',
        '<|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>',
    ),
    "granite": (
        '<|tool_call|>[{"name": "look", "arguments": {"a": "京 </b>", "n": 7}}]',
        '<|tool_call|>[{"name": "f", "arguments": {}}]',
    ),
    "listed_tags": (
        '<tool_calls>[{"name": "look", "arguments": {"a": "京 </b>", "n": 7}}]</tool_calls>',
        '<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>',
    ),
    "python_marked": (
        '<|tool_call_start|>[look(a="京 </b>", n=7)]<|tool_call_end|>',
        "<|tool_call_start|>[f()]<|tool_call_end|>",
    ),
    "llama_json": (
        '<|python_tag|>{"name": "look", "parameters": {"a": "京 </b>", "n": 7}}',
        '{"name": "f", "parameters": {}}',
    ),
    "pythonic": ('[look(a="京 </b>", n=7)]', "[f()]"),
    "harmony": (
        '<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"a": "京 </b>", "n": 7}<|call|>',
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
    ),
}
LOOKED, CALLED = ("call", "look", '{"a": "京 </b>", "n": 7}'), ("call", "f", "{}")
# Forms whose calls stand at an answer's beginning alone, and one whose text is in messages.
FIRST = tuple(name for name, made in FORMATS.items() if made(Marks()).first)
FREE = tuple(name for name in FORMATS if name not in FIRST)


def read(
    text: str,
    form: str = "",
    *,
    cuts: tuple[int, ...] = (),
    cut: bool = False,
    thoughts: str = "",
    thinking: bool = False,
    special: tuple[str, ...] = (),
) -> Said:
    """What a text says; parts of the same kind together. ``special``: marks that are special tokens."""
    marks = Marks({name: number for number, name in enumerate(special)})
    reader = AnswerText(marks, form=form, schemas=SCHEMAS, thoughts=thoughts, thinking=thinking)
    for number, name in enumerate(special):
        text = text.replace(name, marks.letter(number) or "")
    bounds = [0, *sorted(min(at, len(text)) for at in cuts), len(text)]
    parts = [part for begin, end in pairwise(bounds) for part in reader.push(text[begin:end])] + reader.finish(cut=cut)
    found: Said = []
    for part in parts:
        shown = marks.spelt(part.text, named=False)
        if part.call is not None:
            found.append(("call", part.call.name, marks.spelt(part.call.arguments, named=False)))
        elif found and found[-1][0] == part.kind:
            found[-1] = (part.kind, found[-1][1] + shown)
        else:
            found.append((part.kind, shown))
    return found


def read_anyhow(text: str, form: str = "", **how: Any) -> Said:
    """As ``read``, which says the same wherever the text is cut."""
    whole = read(text, form, **how)
    for at in range(len(text)):
        assert read(text, form, cuts=(at,), **how) == whole, at
    assert read(text, form, cuts=(*range(len(text)),), **how) == whole
    return whole


def test_every_form_is_tried() -> None:
    assert set(WRITTEN) == set(NAMES)


@pytest.mark.parametrize("form", NAMES)
def test_a_call_alone(form: str) -> None:
    assert read_anyhow(WRITTEN[form][0], form) == [LOOKED]
    assert read_anyhow(WRITTEN[form][1], form) == [CALLED]


@pytest.mark.parametrize("form", FREE)
def test_text_before_between_and_after_calls(form: str) -> None:
    first, second = WRITTEN[form]
    assert read_anyhow(f"I look.\n{first}\n{second}\n", form) == [("text", "I look."), LOOKED, CALLED]
    assert read_anyhow(f"{first} and {second} so", form) == [LOOKED, ("text", " and"), CALLED, ("text", " so")]


def test_several_calls_in_one_place() -> None:
    listed = '{"name": "f", "arguments": {}}'
    for form, text in (
        ("mistral", f"[TOOL_CALLS] [{listed}, {listed}]"),
        ("phi4", f"<|tool_call|>[{listed},{listed}]<|/tool_call|>"),
        ("llama_json", '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}'),
        ("pythonic", "[f(), f()]"),
        ("deepseek_v31", SECTION.format("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>\n" * 2)),
    ):
        assert read_anyhow(text, form) == [CALLED, CALLED]


@pytest.mark.parametrize("form", FIRST)
def test_some_forms_begin_answers_alone(form: str) -> None:
    text = f"Here: {WRITTEN[form][1]}"
    assert read_anyhow(text, form) == [("text", text)]


@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize(
    "text", ["plain < [ { text\n", " \n", "", "[1, 2] is a list", '{"a": 1} is JSON', "<tool", "ends in <"]
)
def test_text_stays_text(form: str, text: str) -> None:
    assert "".join(part[1] for part in read_anyhow(text, form)) == (
        text.strip() if form == "harmony" and not text.strip() else text
    )


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_of_another_function_is_text(form: str) -> None:
    text = WRITTEN[form][0].replace("look", "nobody")
    said = read_anyhow(text, form)
    assert [kind for kind, *_ in said] == ["text"] and said[0][1] == text


@pytest.mark.parametrize("form", NAMES)
def test_a_call_that_is_cut_is_no_text(form: str) -> None:
    text = WRITTEN[form][0]
    for end in range(len(text)):
        said = read(text[:end], form, cut=True)
        for kind, *told in said:
            if kind == "call":
                assert told[0] == "look" and (LOOKED[2].startswith(told[1]) or told[1].strip() in ("", LOOKED[2]))
            else:
                # What may yet be text: the mark is not all there.
                assert not any(name in told[0] for name in ("look", "京")), told
    cut_within = text[: text.index("京") + 1]
    assert [kind for kind, *_ in read_anyhow(cut_within, form, cut=True)] == ["call"]


MARKED = (
    ("think", "<think>\n{}\n</think>\n\n{}"),
    ("bracketed_think", "[THINK]{}[/THINK]{}"),
    ("diamond_think", "◁think▷{}◁/think▷{}"),
    ("harmony", "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>"),
)


@pytest.mark.parametrize(("thoughts", "text"), MARKED)
def test_a_thought_is_told_apart(thoughts: str, text: str) -> None:
    assert read_anyhow(text.format("hm <b> 京\n so", "Yes."), thoughts=thoughts) == [
        ("thought", "hm <b> 京\n so"),
        ("text", "Yes."),
    ]
    assert read_anyhow(text.format("", "Yes."), thoughts=thoughts) == [("text", "Yes.")]
    special = MARKS if thoughts == "harmony" else THOUGHTS[thoughts]
    assert read(text.format("hm", "Yes."), thoughts=thoughts, special=special) == [("thought", "hm"), ("text", "Yes.")]


def test_thoughts_that_do_not_end_or_that_the_prompt_begins() -> None:
    assert read_anyhow("<think>hm\n", thoughts="think", cut=True) == [("thought", "hm")]
    assert read_anyhow("hm</think> yes", thoughts="think", thinking=True) == [("thought", "hm"), ("text", "yes")]
    assert read_anyhow("\nhm", thoughts="think", thinking=True) == [("thought", "hm")]
    # Only the beginning of an answer is a thought.
    assert read_anyhow("I say <think>hm</think>", thoughts="think") == [("text", "I say <think>hm</think>")]
    assert read_anyhow(" <thi", thoughts="think") == [("text", " <thi")]


def test_calls_stand_behind_thoughts() -> None:
    call = WRITTEN["hermes"][1]
    text = f"<think>\nperhaps {call}\n</think>\n\n{call}"
    assert read_anyhow(text, "hermes", thoughts="think") == [("thought", f"perhaps {call}"), CALLED]
    begun = "<|channel|>analysis<|message|>Perhaps.<|end|>" + WRITTEN["harmony"][0]
    assert read_anyhow(begun, "harmony", thoughts="harmony") == [("thought", "Perhaps."), LOOKED]
    assert read_anyhow(begun + HARMONY_END, "harmony") == [("thought", "Perhaps."), LOOKED, ("text", "done")]


@pytest.mark.parametrize("form", [name for name in FORMATS if name not in ("pythonic", "function_tags")])
def test_marks_that_are_tokens_cannot_be_imitated(form: str) -> None:
    marks = FORMATS[form](Marks()).marks
    text = WRITTEN[form][0]
    assert read(text, form, special=marks) == [LOOKED]
    # The same letters, but not the token that the tokenizer has for them.
    special = Marks({mark: number for number, mark in enumerate(marks)})
    reader = AnswerText(special, form=form, schemas=SCHEMAS)
    parts = [*reader.push(text), *reader.finish(cut=False)]
    assert "".join(part.text for part in parts) == text and all(part.kind == "text" for part in parts)


def listed(text: str) -> list[tuple[str, str]]:
    reader = ListedCalls(long_id)
    found: list[tuple[str, str]] = []
    for _, _, name, part in [said for char in text for said in reader.push(char)] + reader.finish():
        found = [*found, (name, part)] if name else [*found[:-1], (found[-1][0], found[-1][1] + part)]
    return found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[{"name": "f", "arguments": {"a": [1, "b', [("f", '{"a": [1, "b')]),
        ('[{"name": "f", "arguments": {}}, {"name": "look", "arguments": ', [("f", "{}"), ("look", "")]),
        ('[{"name": "f", "arguments": {}}, {"name": "lo', [("f", "{}")]),
        ('[{"name": "f", "arguments": {"b": [1, {"c": "}"}]}}]', [("f", '{"b": [1, {"c": "}"}]}')]),
        ('[{"na', []),
        ("[", []),
    ],
)
def test_a_list_that_is_cut_is_no_content(text: str, told: list[tuple[str, str]]) -> None:
    assert listed(text) == told


PIECES = st.sampled_from(
    [text for pair in WRITTEN.values() for text in pair]
    + [mark for made in FORMATS.values() for mark in made(Marks()).marks]
    + ["<think>", "</think>", '{"name": "f"', '"arguments": {', "}", "]", '"', "\\", " ", "\n", "look", "京", "["]
    # A name that is too long, and almost.
    + ["x" * size for size in (250, 256, 257, 400)]
)


@given(st.lists(PIECES, max_size=8), st.sampled_from(NAMES), st.sampled_from(["", *THOUGHTS]), st.booleans(), st.data())
@settings(max_examples=400, deadline=None)
@pytest.mark.exhaustive
def test_cuts_change_nothing(pieces: list[str], form: str, thoughts: str, cut: bool, data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = data.draw(st.lists(st.integers(0, max(0, len(text))), max_size=12))
    whole = read(text, form, thoughts=thoughts, cut=cut)
    assert read(text, form, thoughts=thoughts, cut=cut, cuts=tuple(cuts)) == whole
    assert read(text, form, thoughts=thoughts, cut=cut, cuts=(*range(len(text)),)) == whole


@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("size", [250, 256, 257, 260, 400])
def test_cuts_within_long_names_change_nothing(form: str, size: int) -> None:
    """Whatever else has come with a name that is too long is no part of it: a call may begin there."""
    for begin in FORMATS[form](Marks()).openings if form in FORMATS else ("<|channel|>commentary to=",):
        for mark in FORMATS[form](Marks()).marks if form in FORMATS else MARKS:
            text = (
                f"{begin}{'x' * size}{mark}{''.join(WRITTEN.get(form, ()))}{HARMONY_END if form == 'harmony' else ''}{begin}"
            )
            for cut in (False, True):
                whole = read(text, form, cut=cut)
                for step in (1, 7):
                    assert read(text, form, cut=cut, cuts=(*range(0, len(text), step),)) == whole, (text, step)


HOSTILE = [
    "<tool_call>", '<tool_call>{"name": "f", "arguments": {"a": "', '<tool_call>{"name"', "[TOOL_CALLS][{", "[f(", "{", '{"a":',
    "<function=look><parameter=a>", "<tool_call>look<arg_key>a</arg_key><arg_value>", "<｜tool▁calls▁begin｜>", "<|channel|>", "<th",
    "<think>", "</think>", '\\"', " ", "<", "[look(a='",
]  # fmt: skip


@pytest.mark.examples(16)
@pytest.mark.parametrize("form", NAMES)
def test_time_grows_as_the_text_does(form: str) -> None:
    def once(text: str, step: int) -> float:
        begin = time.thread_time()
        reader = AnswerText(Marks(), form=form, schemas=SCHEMAS, thoughts="think" if form != "harmony" else "harmony")
        for at in range(0, len(text), step):
            reader.push(text[at : at + step])
        reader.finish(cut=True)
        return time.thread_time() - begin

    def seconds(text: str, step: int) -> float:
        # Now and then Python collects the garbage of all tests before.
        return min(once(text, step) for _ in range(3))

    for piece in HOSTILE:
        for step in (3, 10**6):
            text = piece * (4_000 // len(piece))
            # Five times as much text takes about five times as long; 25 times if all of it were read again and again.
            assert seconds(text * 5, step) < 14 * max(seconds(text, step), 0.004), (piece, step)
