"""Prompts for training data: read from jsonl files, one domain per file.

A line is an object with one of these fields: ``messages`` (a conversation; it is cut after the last message of the user),
``prompt``, ``question`` or ``text`` (the message of a user).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.api.messages import ChatMessage
from speculation.errors import ConfigurationError

_TEXT_FIELDS = ("prompt", "question", "text")
# One prompt in this many thousandths is held out.
_HELD_OUT_THOUSANDTHS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPrompt:
    """A conversation that ends with the user's turn.

    Attributes:
        digest: 16 hexadecimal digits of the hash of its text; the same text is the same prompt in every file.
        where: file and line, for errors.
    """

    domain: str
    messages: tuple[ChatMessage, ...]
    digest: str
    where: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompt:
    """A prompt as token ids, up to where the answer begins.

    Attributes:
        digest: identifies it in every run.
    """

    domain: str
    digest: str
    tokens: tuple[int, ...]

    @property
    def held_out(self) -> bool:
        """Whether it belongs to the validation split: 3 % of all prompts do, by their hash."""
        return int(self.digest[:8], 16) % 1000 < _HELD_OUT_THOUSANDTHS


def read_prompts(files: Sequence[Path]) -> list[TrainingPrompt]:
    """The prompts of jsonl files, in order; a file's name without its ending is its domain. Repeated ones are left out.

    Raises:
        ConfigurationError: a file cannot be read, a line has no prompt, or two files have one name; names file, line, field.
    """
    domains = [file.stem for file in files]
    if len(set(domains)) < len(domains):
        raise ConfigurationError(
            "two files have one name, which names their domain", field="--prompts", verb="", value=", ".join(map(str, files))
        )
    seen: set[str] = set()
    found: list[TrainingPrompt] = []
    for file in files:
        before = len(found)
        for prompt in _of_file(file):
            if prompt.digest not in seen:
                seen.add(prompt.digest)
                found.append(prompt)
        if len(found) == before:
            raise ConfigurationError(
                "holds no prompt that the files before it do not hold", field="--prompts", verb="", value=file
            )
    return found


def _of_file(file: Path) -> Iterator[TrainingPrompt]:
    try:
        # Not splitlines(), which also cuts where JSON may have a line separator within a string.
        lines = file.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigurationError(f"cannot be read ({error.strerror})", field="--prompts", verb="", value=file) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"is not UTF-8 at byte {error.start}", field="--prompts", verb="", value=file) from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{file}, line {number}"
            messages = _messages(line, where)
            text = json.dumps([[message.role, message.content] for message in messages])
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            yield TrainingPrompt(domain=file.stem, messages=tuple(messages), digest=digest, where=where)


def _messages(line: str, where: str) -> list[ChatMessage]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"is not JSON ({error})", field=where) from error
    if not isinstance(content, dict):
        raise ConfigurationError(field=where, allowed=f"an object with one of messages, {', '.join(_TEXT_FIELDS)}")
    if "messages" in content:
        return _conversation(content["messages"], where)
    for field in _TEXT_FIELDS:
        if field in content:
            return [ChatMessage(role="user", content=_text(content[field], f"{where}: {field}"))]
    raise ConfigurationError(
        (f"has the fields {', '.join(sorted(content)) or 'none'}; must have one of messages, {', '.join(_TEXT_FIELDS)}"),
        field=where,
    )


def _conversation(messages: Any, where: str) -> list[ChatMessage]:
    """The messages up to the last one of the user."""
    if not isinstance(messages, list):
        raise ConfigurationError("messages must be a list of objects with role and content", field=where)
    found = []
    for index, message in enumerate(messages):
        at = f"{where}: messages[{index}]"
        if not isinstance(message, dict):
            raise ConfigurationError(f"{at} must be an object with role and content", about=at)
        role, content = _text(message.get("role"), f"{at}.role"), _text(message.get("content"), f"{at}.content")
        found.append(ChatMessage(role=role, content=content))
    while found and found[-1].role != "user":
        found.pop()
    if not found:
        raise ConfigurationError("messages has no message whose role is user", field=where)
    return found


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError(field=what, value=json.dumps(value)[:80], allowed="a text that is not empty")
    return value
