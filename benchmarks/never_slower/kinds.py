"""Which prompts are of which kind, and which kind is asked when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.bench.records import Prompt
from benchmarks.never_slower.builtin_prompts import builtin_prompt

PLAIN_KINDS = ("open", "edits", "code", "summaries", "translation", "json")
MIXED = "mixed"
CHANGING = "changing"
KINDS = (*PLAIN_KINDS, MIXED, CHANGING)

# By task of the prompt file; a task that is not listed asks open questions.
_KIND_OF_TASK = {
    "code_editing": "edits",
    "humaneval": "code",
    "summarization": "summaries",
    "rag": "summaries",
    "json_extraction": "json",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KindPrompt:
    """A prompt's text, and a name that no other prompt has."""

    name: str
    text: str


def kind_of(task: str) -> str:
    """The kind of a task's prompts; a task may also have a kind's name."""
    return task if task in PLAIN_KINDS else _KIND_OF_TASK.get(task, "open")


class PromptPool:
    """All prompts: a file's first, each once, then built-in ones without end.

    Args:
        prompts: of the file. Only first turns are asked: later ones would need answers.
    """

    def __init__(self, prompts: Sequence[Prompt] = ()) -> None:
        self._own: dict[str, list[KindPrompt]] = {kind: [] for kind in PLAIN_KINDS}
        for prompt in prompts:
            entry = KindPrompt(name=f"{prompt.task}/{prompt.id}", text=prompt.turns[0])
            self._own[kind_of(prompt.task)].append(entry)

    def counts(self) -> dict[str, int]:
        """Number of the file's prompts by kind."""
        return {kind: len(own) for kind, own in self._own.items()}

    def prompt(self, kind: str, start: int, number: int) -> KindPrompt:
        """Prompt ``number`` of a run of one kind that begins at ``start``: no two numbers give the same one."""
        own = self._own[kind]
        if number < len(own):
            return own[(start + number) % len(own)]
        at = start + number
        return KindPrompt(name=f"builtin/{kind}/{at}", text=builtin_prompt(kind, at))


class KindOrder:
    """Says of which kind the next prompt is, and its number among those of its kind.

    Args:
        kind: one of ``KINDS``.
        change_every_s: how long a ``changing`` run stays with one kind.
        first: the place in ``PLAIN_KINDS`` where ``mixed`` and ``changing`` begin.
    """

    def __init__(self, kind: str, change_every_s: float, first: int = 0) -> None:
        self._kind, self._change_every_s, self._first = kind, change_every_s, first
        self._taken: Counter[str] = Counter()

    def take(self, elapsed_s: float) -> tuple[str, int]:
        """The next one's kind and number, ``elapsed_s`` after the load began to be measured."""
        kind = self._kind
        if kind == MIXED:
            kind = PLAIN_KINDS[(self._first + self._taken.total()) % len(PLAIN_KINDS)]
        elif kind == CHANGING:
            kind = PLAIN_KINDS[(self._first + int(max(elapsed_s, 0.0) // self._change_every_s)) % len(PLAIN_KINDS)]
        number = self._taken[kind]
        self._taken[kind] += 1
        return kind, number
