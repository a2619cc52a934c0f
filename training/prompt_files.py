"""Prompts for training data: read from files of any form that ``services.prompt_files`` reads, one domain per file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.api.messages import ChatMessage
from services.prompt_files.reader import read_file_prompts
from speculation.errors import ConfigurationError

# One prompt in this many thousandths is held out.
_HELD_OUT_THOUSANDTHS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPrompt:
    """A conversation that ends with the user's turn.

    Attributes:
        digest: 16 hexadecimal digits of the hash of its text; the same text is the same prompt in every file.
        where: file and line, for errors.
        answer: that the target is to read; None: it writes its own.
    """

    domain: str
    messages: tuple[ChatMessage, ...]
    digest: str
    where: str
    answer: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompt:
    """A prompt as token ids, up to where the answer begins.

    Attributes:
        digest: identifies it in every run.
        answer: given, with the token that ends it; empty: the target writes its own.
    """

    domain: str
    digest: str
    tokens: tuple[int, ...]
    answer: tuple[int, ...] = ()

    @property
    def held_out(self) -> bool:
        """Whether it belongs to the validation split: 3 % of all prompts do, by their hash."""
        return int(self.digest[:8], 16) % 1000 < _HELD_OUT_THOUSANDTHS


def read_prompts(files: Sequence[Path], given: Sequence[Path] = ()) -> list[TrainingPrompt]:
    """The prompts of files, in order; a file's name without its ending is its domain. Repeated ones are left out.

    Args:
        given: files whose answers the target reads, in place of writing its own; a prompt may be in ``files`` as well.

    Raises:
        ConfigurationError: a file cannot be read, an entry has no prompt, or in a file of ``given`` no answer, or two files
            have one name; names it.
    """
    domains = [file.stem for file in (*files, *given)]
    if len(set(domains)) < len(domains):
        raise ConfigurationError(
            "two files have one name, which names their domain",
            field="--given" if given else "--prompts",
            verb="",
            value=", ".join(map(str, (*files, *given))),
        )
    return [*_of_files(files, "--prompts"), *_of_files(given, "--given")]


def _of_files(files: Sequence[Path], option: str) -> list[TrainingPrompt]:
    seen: set[str] = set()
    found: list[TrainingPrompt] = []
    for file in files:
        before = len(found)
        for prompt in _of_file(file, option):
            if prompt.digest not in seen:
                seen.add(prompt.digest)
                found.append(prompt)
        if len(found) == before:
            raise ConfigurationError(
                "holds no prompt that the files before it do not hold", field=option, verb="", value=file
            )
    return found


def _of_file(file: Path, option: str) -> Iterator[TrainingPrompt]:
    for where, asked in read_file_prompts(file, option):
        text = json.dumps([[message.role, message.content] for message in asked.messages])
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        if option == "--given" and not asked.answer:
            raise ConfigurationError("has no answer, which the target could read", field=where)
        answer = asked.answer if option == "--given" else None
        yield TrainingPrompt(domain=file.stem, messages=asked.messages, digest=digest, where=where, answer=answer)
