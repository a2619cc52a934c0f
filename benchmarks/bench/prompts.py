"""Reads prompts: Spec-Bench's ``question.jsonl`` with all turns, HumanEval's file, plain text, or the built-in ones."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.bench.records import Prompt
from speculation.errors import ConfigurationError

BUILTIN = "builtin"
_BUILTIN_FILE = Path(__file__).with_name("builtin.jsonl")


def read_prompts(source: str, per_task: int | None = None) -> list[Prompt]:
    """The prompts of a file, at most ``per_task`` of each task, grouped by task in the order of the file.

    Args:
        source: ``builtin`` or a file: ``.jsonl`` with ``turns`` and ``category`` (Spec-Bench) or ``prompt`` and ``task_id``
            (HumanEval) in every line; any other name is plain text, one prompt per line.

    Raises:
        ConfigurationError: the file cannot be read or holds no prompt, or a line is malformed; names the line.
    """
    path = _BUILTIN_FILE if source == BUILTIN else Path(source)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--prompts {source}: {_why(error)}; give a file, or {BUILTIN}") from error
    tasks: dict[str, list[Prompt]] = {}
    seen = set()
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompt = _read_line(path, number, line)
            if (prompt.task, prompt.id) in seen:
                raise ConfigurationError(f"{path}:{number}: {prompt.id} occurs twice in {prompt.task}")
            seen.add((prompt.task, prompt.id))
            tasks.setdefault(prompt.task, []).append(prompt)
    if not tasks:
        raise ConfigurationError(f"--prompts {source}: there is no prompt in it")
    return [prompt for prompts in tasks.values() for prompt in prompts[:per_task]]


def _read_line(path: Path, number: int, line: str) -> Prompt:
    if path.suffix != ".jsonl":
        return Prompt(id=str(number), task="text", turns=(line,))
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigurationError(f"{path}:{number}: not JSON ({error})") from error
    match entry:
        case {"turns": [str(), *_] as turns} if all(isinstance(turn, str) and turn.strip() for turn in turns):
            task = str(entry.get("category", "text"))
            return Prompt(id=str(entry.get("question_id", number)), task=task, turns=tuple(turns))
        case {"prompt": str(text)} if text.strip():
            return Prompt(id=str(entry.get("task_id", number)), task="humaneval", turns=(text,))
    raise ConfigurationError(
        f'{path}:{number}: neither a Spec-Bench line ({{"category": "...", "turns": ["...", ...]}}) '
        'nor a HumanEval line ({"task_id": "...", "prompt": "..."})'
    )


def _why(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or "cannot be read" if isinstance(error, OSError) else "not UTF-8 text"
