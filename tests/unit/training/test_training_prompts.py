"""Prompts of training data: files in many forms, the target's own, those that are refused or left out, and the tasks made of them."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.router.tokens import Tokens
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.trainings.data_runs import OPTIONS, TASKS, make, make_model, write_prompts
from training import own_prompts
from training.data_folder import DataOptions, encode_prompts
from training.data_manifest import read_data_manifest
from training.own_prompts import turn_frame
from training.prompt_files import read_prompts
from training.shards import read_shards
from training.tasks import tasks_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_prompts(tmp_path_factory.mktemp("prompts"))


@pytest.mark.parametrize("field", ["max_new_tokens", "samples", "max_prompt_tokens", "shard_sequences", "seed"])
def test_options_out_of_range_are_refused(field: str) -> None:
    with refuses(ConfigurationError, f"--{field.replace('_', '-')}", -1, allowed="from"):
        DataOptions(**{field: -1})


def test_tasks_are_a_balanced_mix_from_the_beginning(model: Path, files: list[Path]) -> None:
    prompts = encode_prompts(read_prompts(files), Tokens(str(model)))
    tasks = tasks_of(prompts, 3, 0)
    assert [task.prompt.domain for task in tasks[:6]] == ["math", "code", "chat"] * 2
    assert len({task.id for task in tasks}) == TASKS
    assert len({task.seed(0) for task in tasks}) == TASKS
    for prompt in prompts:
        # One greedy answer, among the first two.
        temperatures = [task.temperature for task in tasks if task.prompt == prompt]
        assert sorted(temperatures[:2]) == [0, 1] and temperatures[2] == 1
    assert [task.id for task in tasks_of(prompts, 3, 1)] != [task.id for task in tasks]


@pytest.mark.exhaustive
async def test_the_target_makes_its_own_prompts(model: Path, tmp_path: Path) -> None:
    options = replace(OPTIONS, own_prompts=8, samples=1, max_prompt_tokens=200)
    stopped = await make(tmp_path / "one", model, [], options, stop_at=30)
    assert stopped.stage == "own prompts" and stopped.done < stopped.total
    await make(tmp_path / "one", model, [], options)
    await make(tmp_path / "two", model, [], options)
    found = read_shards(tmp_path / "one")
    assert 2 <= len(found) <= 8
    assert [s.tokens.tolist() for s in found] == [s.tokens.tolist() for s in read_shards(tmp_path / "two")]
    assert found.manifest.shards == read_data_manifest(tmp_path / "two").shards
    frame = turn_frame(Tokens(str(model)))
    for sequence in found:
        prompt = tuple(sequence.tokens[: sequence.prompt_length].tolist())
        assert prompt[: len(frame.before)] == frame.before
        assert prompt[-len(frame.after) :] == frame.after
        assert len(prompt) > len(frame.before) + len(frame.after)


async def test_messages_that_do_not_end_are_no_prompts(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_prompts, "_MOST_TOKENS", 1)
    with refuses(ConfigurationError, field="--prompts", value="missing"):
        await make(tmp_path / "data", model, [], replace(OPTIONS, own_prompts=5))


async def test_without_a_chat_template_prompts_are_needed(model: Path, files: list[Path], tmp_path: Path) -> None:
    bare = Path(shutil.copytree(model, tmp_path / "bare"))
    (bare / "chat_template.jinja").unlink()
    with refuses(ConfigurationError, field="--prompts", value="missing"):
        await make(tmp_path / "data", bare, [], replace(OPTIONS, own_prompts=3))
    progress = await make(tmp_path / "data", bare, files, replace(OPTIONS, sequences=3))
    assert progress.done == 3


@pytest.mark.exhaustive
async def test_own_prompts_are_saved_under_way(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_prompts, "_SAVE_EVERY", 2)
    kept: list[int] = []
    write_all = own_prompts.write_whole

    def count(file: Path, content: bytes) -> None:
        kept.append(len(json.loads(content)["prompts"]))
        write_all(file, content)

    monkeypatch.setattr(own_prompts, "write_whole", count)
    await make(tmp_path / "data", model, [], replace(OPTIONS, own_prompts=6, samples=1, max_prompt_tokens=200))
    assert kept == [2, 4, 6, 6]
    # A run that is killed while it writes them leaves a part of a file.
    again = tmp_path / "again"
    again.mkdir()
    shutil.copy(tmp_path / "data" / "own-prompts.json", again)
    (again / "own-prompts.json.0123abcd.partial").write_bytes(b"{")
    await make(again, model, [], replace(OPTIONS, own_prompts=6, samples=1, max_prompt_tokens=200))
    assert not list(again.glob("*.partial"))

    def full(file: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    monkeypatch.setattr(own_prompts, "write_whole", full)
    with refuses(ConfigurationError, field="full/own-prompts.json"):
        await make(tmp_path / "full", model, [], replace(OPTIONS, own_prompts=2, samples=1, max_prompt_tokens=200))


async def test_prompts_that_are_too_long_are_left_out(model: Path, files: list[Path], tmp_path: Path) -> None:
    long = write(tmp_path, json.dumps({"text": "so " * 200}))
    said: list[str] = []
    await make(tmp_path / "data", model, [*files, long], replace(OPTIONS, sequences=3), said=said.append)
    assert said == ["1 of 10 prompts are left out: they are too long"]
    with refuses(ConfigurationError, field="--max-prompt-tokens"):
        await make(tmp_path / "none", model, [long], replace(OPTIONS, max_prompt_tokens=300, max_new_tokens=500))


async def test_conversations_that_the_template_refuses_are_named(model: Path, tmp_path: Path) -> None:
    wizard = write(tmp_path, '{"messages": [{"role": "wizard", "content": "a"}, {"role": "user", "content": "b"}]}')
    with refuses(ConfigurationError, field="asked.jsonl:1"):
        await make(tmp_path / "data", model, [wizard])


def write(folder: Path, text: str) -> Path:
    file = folder / "asked.jsonl"
    file.write_text(text)
    return file


def test_prompt_files_have_many_forms(tmp_path: Path) -> None:
    turns = [("system", "be brief"), ("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "2")]
    messages = [{"role": role, "content": content} for role, content in turns]
    lines: list[dict[str, Any]] = [
        {"prompt": "p"}, {"question": "q"}, {"text": "t"}, {"messages": messages, "text": "ignored"}, {"text": "q"},
    ]  # fmt: skip
    found = read_prompts([write(tmp_path, "\n\r\n".join(map(json.dumps, lines)))])
    assert [[(m.role, m.content) for m in prompt.messages] for prompt in found] == [
        [("user", "p")], [("user", "q")], [("user", "t")], turns[:4],
    ]  # fmt: skip
    assert {prompt.domain for prompt in found} == {"asked"}


def test_line_separators_may_stand_in_a_text(tmp_path: Path) -> None:
    texts = ["one\u2028line", "a\u0085b\u2029c"]
    found = read_prompts([write(tmp_path, "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts))])
    assert [prompt.messages[0].content for prompt in found] == texts


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ('{"text": "a"}\n{"text"', ("asked.jsonl:2",)),
        ('"text"', ("asked.jsonl:1", None, "must be an object with one of turns")),
        (
            '{"code": "a", "answer": "b"}',
            ("asked.jsonl:1", None, "has the fields answer, code; must have one of turns"),
        ),
        ("{}", ("asked.jsonl:1", None, "has the fields none")),
        ('{"text": 3}', ("asked.jsonl:1: text", 3)),
        ('{"question": " "}', ("asked.jsonl:1: question", '" "')),
        ('{"messages": "hello"}', ("asked.jsonl:1", None, "messages must be a list")),
        ('{"messages": ["hello"]}', ("asked.jsonl:1: messages[0]",)),
        ('{"messages": [{"role": "user"}]}', ("asked.jsonl:1: messages[0].content", "null")),
        (
            '{"messages": [{"role": "assistant", "content": "a"}]}',
            ("asked.jsonl:1", None, "messages has no message whose role is user"),
        ),
        ("", ("--prompts", "asked.jsonl")),
    ],
)
def test_wrong_prompt_files_are_named_with_line_and_field(text: str, refusal: tuple[object, ...], tmp_path: Path) -> None:
    with refuses(ConfigurationError, *refusal):
        read_prompts([write(tmp_path, text)])


def test_unreadable_prompt_files_are_named(tmp_path: Path) -> None:
    with refuses(ConfigurationError, field="--prompts", value="nowhere.jsonl"):
        read_prompts([tmp_path / "nowhere.jsonl"])
    (tmp_path / "asked.jsonl").write_bytes(b'{"text": "\xff"}')
    with refuses(ConfigurationError, field="--prompts", value="asked.jsonl"):
        read_prompts([tmp_path / "asked.jsonl"])
    with refuses(ConfigurationError, field="--prompts", says="one name"):
        read_prompts([tmp_path / "asked.jsonl", tmp_path / "deeper" / "asked.jsonl"])
