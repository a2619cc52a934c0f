"""Conversations as chat templates read them: parts, named tokens and templates, names, tools, and nothing left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from transformers import AutoTokenizer

from services.api.messages import ChatMessage, ChatOptions
from services.router.tokens import Tokens
from services.tool_formats.answer_text import AnswerText
from services.tool_formats.catalogue import FORMATS, NAMES
from services.tool_formats.interface import ToolCall
from services.tool_formats.json_calls import long_id
from services.tool_formats.marks import Marks
from speculation.errors import InvalidArgument
from tests.running.refusals import refuses
from tests.servers.chat_templates import BY_FORM, CUTTING, THINKING
from tests.tiny_models.tiny import make_tiny_tokenizer

USER = ChatMessage(role="user", content="Is it safe?")
PARTS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALLED = ChatMessage(
    role="assistant", content="", tool_calls='[{"id": "c", "function": {"name": "look", "arguments": {"a": 7}}}]'
)
ANSWERED = ChatMessage(role="tool", content="nothing", tool_call_id="c")


def with_settings(folder: Path, template: Any = PLAIN, **settings: Any) -> Path:
    make_tiny_tokenizer(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template, **settings}))
    return folder


def rendered(folder: Path, *messages: ChatMessage, tools: bool = False, generic: bool = True, **options: Any) -> str:
    tokens = Tokens(str(folder), generic_tools=generic)
    given = ChatOptions(tools=json.dumps([TOOL]) if tools else "", **options)
    return tokens.decode(tokens.encode_chat(messages, given))


def test_a_template_that_reads_parts_gets_parts(tmp_path: Path) -> None:
    with_settings(tmp_path, PARTS)
    assert rendered(tmp_path, USER) == "<user>Is it safe?<assistant>"
    begun = ChatMessage(role="assistant", content="It is")
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert rendered(tmp_path, USER, begun, **options) == "<user>Is it safe?<assistant>It is"


@pytest.mark.parametrize(
    ("template", "messages", "field"),
    [
        ("{{ messages[-1].content }}", (USER, ChatMessage(role="user", content="Sure?")), "messages[0].content"),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
         (ChatMessage(role="system", content="be brief"), USER), "messages[0].content"),
        ("{% for m in messages %}{{ m.content[:4] }}{% endfor %}", (USER,), "messages[0].content"),
        ("nothing", (USER,), "messages[0].content"),
    ],
)  # fmt: skip
def test_a_text_that_the_template_leaves_out_is_refused(
    tmp_path: Path, template: str, messages: tuple[ChatMessage, ...], field: str
) -> None:
    with_settings(tmp_path, template)
    with refuses(InvalidArgument, field=field):
        rendered(tmp_path, *messages)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content | trim }}{% endfor %}",
        "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
        "{% for m in messages %}{{ m.content.split() | join(' ') }}{% endfor %}",
        "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
    ],
)
def test_a_text_may_be_trimmed_and_spelt(tmp_path: Path, template: str) -> None:
    with_settings(tmp_path, template)
    assert rendered(
        tmp_path, ChatMessage(role="user", content=' "a\n b"\t\n'), USER, ChatMessage(role="user", content=" \n")
    )


NAMED: list[dict[str, Any]] = [
    {"eot_token": "<|user|>"},
    {"extra_special_tokens": {"boi_token": "<|user|>"}},
    {"model_specific_special_tokens": {"image_token": "<|user|>"}},
    {"eot_token": {"__type": "AddedToken", "content": "<|user|>"}},
    {"eot_token": None, "boi_token": False, "bos_token": "<|system|>"},
    {"extra_special_tokens": ["<|user|>"]},
]


@pytest.mark.parametrize("settings", NAMED, ids=range(len(NAMED)))
def test_named_tokens_are_those_of_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    names = "|".join(f"{{{{ {name} }}}}" for name in ("eot_token", "boi_token", "image_token", "bos_token", "eos_token"))
    with_settings(tmp_path, "{{ messages[0].content }}" + names, **settings)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert rendered(tmp_path, USER) == theirs.apply_chat_template(
        [{"role": "user", "content": USER.content}], tokenize=False
    )


def test_tools_have_a_template_of_their_own(tmp_path: Path) -> None:
    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": "{{ tools | tojson }}" + PLAIN}]
    with_settings(tmp_path, named)
    assert rendered(tmp_path, USER) == "<user>Is it safe?<assistant>"
    assert rendered(tmp_path, USER, tools=True) == f"{json.dumps([TOOL])}<user>Is it safe?<assistant>"
    # In files, too.
    with_settings(tmp_path, None)
    (tmp_path / "chat_template.jinja").write_text(PLAIN)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }}" + PLAIN)
    assert rendered(tmp_path, USER, tools=True) == "1<user>Is it safe?<assistant>"


def test_a_model_without_a_default_template_completes_text(tmp_path: Path) -> None:
    with_settings(tmp_path, [{"name": "rag", "template": PLAIN}, {"name": "tool_use", "template": PLAIN}])
    assert Tokens(str(tmp_path)).encode("fox")
    with refuses(InvalidArgument, field="messages"):
        rendered(tmp_path, USER)
    assert "<user>Is it safe?" in rendered(tmp_path, USER, tools=True)


def test_names_are_written_or_refused(tmp_path: Path) -> None:
    ann = ChatMessage(role="user", content="hi", name="Ann")
    with_settings(tmp_path, "{# name #}" + PLAIN)
    with refuses(InvalidArgument, field="messages[1].name", value="Ann"):
        rendered(tmp_path, USER, ann)
    with_settings(tmp_path, "{% for m in messages %}{{ m.name or m.role }}:{{ m.content }} {% endfor %}")
    assert rendered(tmp_path, USER, ann) == "user:Is it safe? Ann:hi "
    with_settings(
        tmp_path, "{% for m in messages %}{% if m.role == 'user' %}{{ m.name }}{% endif %}{{ m.content }}{% endfor %}"
    )
    assert Tokens(str(tmp_path)).conversations.named_roles == ("user",)
    with_settings(tmp_path, "{% for m in messages %}{{ m.name or m.role }}:{{ m.content }} {% endfor %}")
    assert Tokens(str(tmp_path)).conversations.named_roles == ("assistant", "developer", "system", "user")
    # A tool's name is no matter where the template goes by the order.
    assert "nothing" in rendered(tmp_path, USER, CALLED, ChatMessage(role="tool", content="nothing", name="look"))


def test_tools_without_a_place_get_a_general_form(tmp_path: Path) -> None:
    with_settings(tmp_path)
    assert Tokens(str(tmp_path)).conversations.tool_format == "hermes"
    text = rendered(tmp_path, ChatMessage(role="system", content="Be brief."), USER, CALLED, ANSWERED, ANSWERED, tools=True)
    assert text.startswith("<system>Be brief.\n\nYou may call") and json.dumps(TOOL) in text
    assert (
        '<assistant><tool_call>\n{"name": "look", "arguments": {"a": 7}}\n</tool_call><user><tool_response>\nnothing\n'
        "</tool_response>\n<tool_response>\nnothing\n</tool_response><assistant>"
    ) in text
    assert rendered(tmp_path, USER, tools=True).startswith("<system>You may call")


def test_calls_have_the_form_of_the_tools(tmp_path: Path) -> None:
    # Calls have a place in this template, tools have none.
    with_settings(tmp_path, BY_FORM["deepseek_v31"].replace("{% if tools %}", "{% if false %}"))
    assert Tokens(str(tmp_path)).conversations.tool_format == "hermes"
    assert '<tool_call>\n{"name": "look"' in rendered(tmp_path, USER, CALLED, ANSWERED, tools=True)
    assert "<｜tool▁call▁begin｜>look" in rendered(tmp_path, USER, CALLED, ANSWERED)


def test_a_template_without_a_system_message(tmp_path: Path) -> None:
    with_settings(tmp_path, "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + PLAIN)
    assert rendered(tmp_path, USER, tools=True).startswith("<user>You may call")


def test_tools_by_the_template_alone(tmp_path: Path) -> None:
    with_settings(tmp_path)
    assert Tokens(str(tmp_path), generic_tools=False).conversations.tool_format == ""
    with refuses(InvalidArgument, field="tools"):
        rendered(tmp_path, USER, tools=True, generic=False)
    with refuses(InvalidArgument, field="messages[1].tool_calls"):
        rendered(tmp_path, USER, CALLED, ANSWERED, generic=False)


@pytest.mark.parametrize("form", BY_FORM)
def test_a_form_of_calls_is_known_by_reading_one_back(tmp_path: Path, form: str) -> None:
    tokens = Tokens(str(with_settings(tmp_path, BY_FORM[form])))
    assert tokens.conversations.tool_format == form
    # What a call of ours looks like when a client sends it back.
    made = long_id if form == "harmony" else FORMATS[form](Marks()).call_id
    call = {"id": made("look", 0), "type": "function", "function": {"name": "look", "arguments": {"a": "b"}}}
    text = rendered(tmp_path, USER, ChatMessage(role="assistant", content="", tool_calls=json.dumps([call])), ANSWERED)
    reader = AnswerText(Marks(), form=form, schemas={"look": {}})
    parts = [*reader.push(text.partition("<|closed|>")[2].removeprefix("<|assistant|>")), *reader.finish(cut=False)]
    assert form == "harmony" or [part.call for part in parts if part.call is not None] == [
        ToolCall("look", '{"a": "b"}', call["id"] if form in ("kimi_k2", "mistral") else ANY)
    ]
    # Cut short: its arguments are no JSON.
    cut = {**call, "function": {"name": "look", "arguments": '{"a": "b", "c": [1'}}
    assert "look" in rendered(tmp_path, USER, ChatMessage(role="assistant", content="", tool_calls=json.dumps([cut])))


def test_every_form_has_a_template() -> None:
    assert set(BY_FORM) == set(NAMES)


def test_a_form_that_is_not_read_is_not_offered(tmp_path: Path) -> None:
    other = BY_FORM["hermes"].replace("<tool_call>", "<call>").replace("</tool_call>", "</call>")
    assert Tokens(str(with_settings(tmp_path, other))).conversations.tool_format == ""
    lost = BY_FORM["hermes"].replace('"arguments"', '"input"')
    assert Tokens(str(with_settings(tmp_path, lost))).conversations.tool_format == ""


def test_thoughts_go_to_templates_that_read_them(tmp_path: Path) -> None:
    thought = ChatMessage(role="assistant", content="yes", reasoning="hm")
    with_settings(tmp_path, "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }} {% endfor %}")
    assert rendered(tmp_path, USER, thought, USER) == "|Is it safe? hm|yes |Is it safe? "
    with_settings(tmp_path)
    with refuses(InvalidArgument, field="messages[1].reasoning_content", value="hm"):
        rendered(tmp_path, USER, thought, USER)


def test_thoughts_go_by_the_name_that_the_template_reads(tmp_path: Path) -> None:
    thought = ChatMessage(role="assistant", content="yes", reasoning="hm")
    with_settings(tmp_path, BY_FORM["harmony"])
    assert "<|channel|>analysis<|message|>hm<|end|>" in rendered(tmp_path, USER, thought, USER)
    with_settings(tmp_path, THINKING)
    assert "<think>\nhm\n</think>\n\nyes" in rendered(tmp_path, USER, thought, USER)


# As Mistral's templates read thoughts: in the content, as a text or as a list of texts.
IN_CONTENT = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'thinking' %}[THINK]{{ READ }}[/THINK]{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("read", ["part.thinking", "part.thinking[0].text", "part.thinking | map(attribute='text') | join"])
def test_thoughts_go_into_the_content_where_the_template_reads_them_there(tmp_path: Path, read: str) -> None:
    thought = ChatMessage(role="assistant", content="yes", reasoning="hm")
    with_settings(tmp_path, IN_CONTENT.replace("READ", read))
    assert rendered(tmp_path, USER, thought, USER) == "<user>Is it safe?<assistant>[THINK]hm[/THINK]yes<user>Is it safe?"
    begun = ChatOptions(continue_final_message=True, add_generation_prompt=False)
    tokens = Tokens(str(tmp_path))
    assert tokens.decode(tokens.encode_chat([USER, thought], begun)) == "<user>Is it safe?<assistant>[THINK]hm[/THINK]yes"
    only = ChatMessage(role="assistant", content="", reasoning="hm")
    assert tokens.decode(tokens.encode_chat([USER, only], begun)) == "<user>Is it safe?<assistant>[THINK]hm[/THINK]"


@pytest.mark.parametrize("written", ["{{ m.content }}", "{{ m.content | tojson }}", "{{ m.content | string }}"])
def test_a_content_that_is_written_as_it_is_is_no_place_for_thoughts(tmp_path: Path, written: str) -> None:
    with_settings(tmp_path, "{% for m in messages %}" + written + "{% endfor %}")
    assert not Tokens(str(tmp_path)).conversations.reads_thoughts


MARKED: list[tuple[str, str, bool]] = [
    (THINKING, "think", True),
    (CUTTING, "think", False),
    (BY_FORM["harmony"], "harmony", True),
    (PLAIN, "", False),
    ("{# [THINK] [/THINK] #}" + PLAIN, "bracketed_think", False),
]


@pytest.mark.parametrize(("template", "thoughts", "reads"), MARKED)
def test_how_a_model_thinks_is_known_by_its_template(tmp_path: Path, template: str, thoughts: str, reads: bool) -> None:
    tokens = Tokens(str(with_settings(tmp_path, template)))
    assert (tokens.conversations.thoughts, tokens.conversations.reads_thoughts) == (thoughts, reads)
    told = Tokens(str(tmp_path), thoughts=False)
    assert told.conversations.thoughts == "" and told.conversations.tool_format != "harmony"


def test_how_a_model_thinks_is_known_by_its_tokens(tmp_path: Path) -> None:
    with_settings(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    most = max(entry["id"] for entry in content["added_tokens"]) + 1000
    for name in ("<think>", "</think>"):
        entry = {**content["added_tokens"][0], "content": name, "id": most, "special": False, "normalized": False}
        content["added_tokens"].append(entry)
        content["model"]["vocab"][name] = most
        most += 1
    file.write_text(json.dumps(content))
    assert Tokens(str(tmp_path)).conversations.thoughts == "think"


def test_a_template_that_fails_is_told(tmp_path: Path) -> None:
    with_settings(tmp_path, "{{ raise_exception('never') }}")
    with refuses(InvalidArgument, field="messages"):
        rendered(tmp_path, USER)
