"""Reads prompts: Spec-Bench's ``question.jsonl`` with all turns, HumanEval's file, plain text, or the built-in ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.bench.records import Prompt, Request, TimedAnswer
from services.api.messages import ChatMessage
from services.router.tokens import Tokens
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
        raise ConfigurationError(
            f"{_why(error)}; give a file, or {BUILTIN}", field="--prompts", verb="", value=source
        ) from error
    tasks: dict[str, list[Prompt]] = {}
    seen = set()
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompt = _read_line(path, number, line)
            if (prompt.task, prompt.id) in seen:
                raise ConfigurationError(f"{prompt.id} occurs twice in {prompt.task}", field=f"{path}:{number}")
            seen.add((prompt.task, prompt.id))
            tasks.setdefault(prompt.task, []).append(prompt)
    if not tasks:
        raise ConfigurationError("there is no prompt in it", field="--prompts", verb="", value=source)
    return [prompt for prompts in tasks.values() for prompt in prompts[:per_task]]


def _read_line(path: Path, number: int, line: str) -> Prompt:
    if path.suffix != ".jsonl":
        return Prompt(id=str(number), task="text", turns=(line,))
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigurationError(f"not JSON ({error})", field=f"{path}:{number}") from error
    match entry:
        case {"turns": [str(), *_] as turns} if all(isinstance(turn, str) and turn.strip() for turn in turns):
            task = str(entry.get("category", "text"))
            return Prompt(id=str(entry.get("question_id", number)), task=task, turns=tuple(turns))
        case {"prompt": str(text)} if text.strip():
            return Prompt(id=str(entry.get("task_id", number)), task="humaneval", turns=(text,))
    raise ConfigurationError(
        (
            'neither a Spec-Bench line ({"category": "...", "turns": ["...", ...]}) nor a HumanEval line '
            '({"task_id": "...", "prompt": "..."})'
        ),
        field=f"{path}:{number}",
    )


def _why(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or "cannot be read" if isinstance(error, OSError) else "not UTF-8 text"


Ask = Callable[[Sequence[Request]], Sequence[TimedAnswer]]


def make_requests(prompts: Sequence[Prompt], tokens: Tokens, ask: Ask, seed: int) -> list[Request]:
    """One request per turn, in the order of the prompts.

    A turn after the first needs an answer to the one before. ``ask`` provides it (by plain decoding, not timed), so that all
    contestants continue the same conversation, whatever they answered themselves.
    """
    made: list[list[Request]] = [[] for _ in prompts]
    dialogues: list[list[ChatMessage]] = [[] for _ in prompts]
    number = 0
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        going = [i for i, prompt in enumerate(prompts) if turn < len(prompt.turns)]
        for i in going:
            dialogues[i].append(ChatMessage(role="user", content=prompts[i].turns[turn]))
            name = f"{prompts[i].task}/{prompts[i].id}" + (f"/turn {turn + 1}" if len(prompts[i].turns) > 1 else "")
            ids = _encode(tokens, dialogues[i])
            made[i].append(
                Request(id=name, task=prompts[i].task, prompt=ids, seed=seed + number, turn=prompts[i].turns[turn])
            )
            number += 1
        continued = [i for i in going if turn + 1 < len(prompts[i].turns)]
        for i, answer in zip(continued, ask([made[i][turn] for i in continued]) if continued else (), strict=True):
            dialogues[i].append(ChatMessage(role="assistant", content=_text(tokens, answer)))
    return [request for requests in made for request in requests]


def _encode(tokens: Tokens, dialogue: Sequence[ChatMessage]) -> tuple[int, ...]:
    """Encode with the model's chat template; a base model, which has none, continues the text."""
    if tokens.has_chat_template:
        return tokens.encode_chat(dialogue)
    return tokens.encode("\n\n".join(message.content for message in dialogue))


def _text(tokens: Tokens, answer: TimedAnswer) -> str:
    detokenizer = tokens.detokenizer()
    return "".join(detokenizer.push(token) for token in answer.tokens) + detokenizer.flush()
