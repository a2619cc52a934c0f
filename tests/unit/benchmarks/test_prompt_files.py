"""Files of prompts: every public form is read, by benchmarks and by training alike, and what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench.prompts import read_prompts
from services.prompt_files.reader import read_file_prompts
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from training import prompt_files

LONG = "He said so.\nShe agreed."
# An entry as its set is published; the task, the id, the first message, and the turns that follow.
FORMS = [
    ({"question_id": 81, "category": "mt_bench", "turns": ["One?", "Two?"]}, "mt_bench", "81", "One?", ("Two?",)),
    ({"task_id": "HumanEval/0", "prompt": "def f():", "test": "x"}, "humaneval", "HumanEval/0", "def f():", ()),
    ({"text": "Add.", "task_id": 601, "test_list": ["assert a"]}, "mbpp", "601", '"""Add.\nassert a\n"""', ()),
    ({"prompt": "Add.", "task_id": 2, "test_list": ["assert a"]}, "mbpp", "2", '"""Add.\nassert a\n"""', ()),
    ({"question": "How many?", "answer": "#### 72"}, "gsm8k", "1", "How many?", ()),
    (
        {"id": "Qx_1", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        "sharegpt", "Qx_1", "Hi", (),
    ),
    ({"id": "42c0", "article": LONG, "highlights": "a"}, "cnn_dm", "42c0", f"Summarize:\n{LONG}\nSummary:\n", ()),
    (
        {"fname": "train_0", "dialogue": LONG, "summary": "a"},
        "dialogsum", "train_0", f"Summarize this dialogue:\n{LONG}\nSummary:\n", (),
    ),
    ({"mr": "name[Alimentum]", "ref": "a"}, "e2e", "1", "Write one or two sentences that say this: name[Alimentum]", ()),
    (
        {"meaning_representation": "name[Alimentum]"},
        "e2e", "1", "Write one or two sentences that say this: name[Alimentum]", (),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "task", "name", "first", "further"), FORMS)
def test_public_sets_are_read(
    entry: dict[str, object], task: str, name: str, first: str, further: tuple[str, ...], tmp_path: Path
) -> None:
    lines, whole = tmp_path / "set.jsonl", tmp_path / "set.json"
    lines.write_text(json.dumps(entry))
    whole.write_text(json.dumps([entry]))
    for file in (lines, whole):
        (prompt,) = read_prompts(str(file))
        assert (prompt.task, prompt.id, prompt.turns) == (task, name, (first, *further))
    # Training has no answer to go on from, so it asks the first turn alone.
    (asked,) = prompt_files.read_prompts([lines])
    assert [(message.role, message.content) for message in asked.messages] == [("user", first)]


def test_tables_are_read(tmp_path: Path) -> None:
    file = tmp_path / "trainset.csv"
    file.write_text('mr,ref\n"name[A],\nfood[B]",x\nname[C],y\n')
    found = list(read_file_prompts(file))
    assert [where for where, _ in found] == [f"{file}:3", f"{file}:4"]
    assert found[0][1].messages[0].content.endswith("name[A],\nfood[B]")


def test_recorded_answers_are_for_training_alone(tmp_path: Path) -> None:
    turns = [("system", "be brief"), ("human", "one"), ("gpt", "1"), ("human", "two"), ("gpt", "2")]
    file = tmp_path / "chats.json"
    file.write_text(json.dumps([{"conversations": [{"from": role, "value": text} for role, text in turns]}]))
    (prompt,) = read_prompts(str(file))
    assert (prompt.system, prompt.turns) == ("be brief", ("one", "two"))
    (asked,) = prompt_files.read_prompts([file])
    assert [message.content for message in asked.messages] == ["be brief", "one", "1", "two"]
    assert asked.answer is None
    # Unless they are asked for.
    (read,) = prompt_files.read_prompts([], [file])
    assert (read.messages, read.answer, read.digest) == (asked.messages, "2", asked.digest)


@pytest.mark.parametrize(
    ("entry", "answer"),
    [
        ({"question": "1 + 1", "answer": "2"}, "2"),
        ({"text": "add", "test_list": ["assert 1"], "code": "def add(): ..."}, "def add(): ..."),
        ({"prompt": "def f():", "task_id": "HumanEval/1", "canonical_solution": "    return 1"}, "    return 1"),
        ({"article": "long", "highlights": "short"}, "short"),
        ({"dialogue": "a: b", "summary": "c"}, "c"),
        ({"mr": "name[x]", "ref": "x is"}, "x is"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "b"),
    ],
)
def test_sets_that_hold_answers_give_them(entry: dict[str, Any], answer: str, tmp_path: Path) -> None:
    file = tmp_path / "given.json"
    file.write_text(json.dumps([entry]))
    (read,) = prompt_files.read_prompts([], [file])
    assert read.answer == answer


@pytest.mark.parametrize(
    "entry",
    [
        {"question": "1 + 1"},
        {"question": "1 + 1", "answer": " "},
        {"turns": ["a"]},
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]},
    ],
)
def test_given_files_without_an_answer_are_refused(entry: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "given.json"
    file.write_text(json.dumps([entry]))
    with refuses(ConfigurationError, field="given.json[0]", says="has no answer"):
        prompt_files.read_prompts([], [file])
    with refuses(ConfigurationError, field="--given", says="one name"):
        prompt_files.read_prompts([file], [file])
    with refuses(ConfigurationError, field="--given", value="nowhere.json"):
        prompt_files.read_prompts([], [tmp_path / "nowhere.json"])


@pytest.mark.parametrize(
    ("name", "text", "refusal"),
    [
        ("a.json", "{", ("a.json", None, "is not JSON")),
        ("a.json", '{"turns": ["a"]}', ("a.json", None, "must hold a list")),
        ("a.json", '[{"turns": ["a"]}, 3]', ("a.json[1]",)),
        ("a.csv", "mr,ref\n,x\n", ("a.csv:2: mr", '""')),
        ("a.csv", "mr\nx,y,z\n\n,,\n", ("a.csv:4: mr",)),
        ("a.csv", "one,two\nx,y,z\n", ("a.csv:2", None, "has the fields None, one, two")),
        ("a.jsonl", '{"text": "a", "test_list": []}', ("a.jsonl:1", None, "test_list must be")),
        ("a.jsonl", '{"conversations": [{"from": "bing", "value": "a"}]}', ("a.jsonl:1: conversations[0].from", "bing")),
        (
            "a.jsonl",
            '{"conversations": [{"from": "gpt", "value": "a"}]}',
            ("a.jsonl:1", None, "no message whose role is user"),
        ),
        ("a.jsonl", '{"article": null}', ("a.jsonl:1: article", "null")),
        ("a.jsonl", '{"turns": "a"}', ("a.jsonl:1", None, "turns must be")),
    ],
)
def test_wrong_entries_are_named(name: str, text: str, refusal: tuple[Any, ...], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with refuses(ConfigurationError, *refusal):
        read_prompts(str(tmp_path / name))
