"""What users saw, as a history that a checker reads afterwards: the same one judges every arrangement of components.

A stream may end in two ways: with exactly the tokens of plain decoding, or in one error that says what happened. At every
moment it has shown a prefix of those tokens: nothing is repeated, missing or other. A saved history holds the plan that it
came from and the tokens of plain decoding, so that it can be judged, and its cell run again, without anything else.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.chaos.cells import Plan

TOKENS, DONE, FAILED, FAULT, HEALED = "tokens", "done", "failed", "fault", "healed"
# What is seen when all is over, and nobody but the users has done anything: something is not as it was, or not as it should be.
UNSETTLED = "unsettled"
# The stream of a user who comes after the fault has begun, and asks until there is an answer.
AFTERWARDS = "afterwards"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that was seen, ``at`` seconds after the history began. ``stream`` is empty for faults."""

    at: float
    kind: str
    stream: str = ""
    tokens: tuple[int, ...] = ()
    text: str = ""


class History:
    """Events in the order in which they were seen."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._began = time.monotonic()

    def add(self, kind: str, stream: str = "", tokens: Sequence[int] = (), text: str = "") -> None:
        self.events.append(Event(time.monotonic() - self._began, kind, stream, tuple(tokens), text))


@dataclass(frozen=True, slots=True)
class Record:
    """A run of a cell: its plan, what every stream had to show, and what users saw."""

    plan: Plan
    expected: Mapping[str, Sequence[int]]
    events: Sequence[Event]

    def save(self, file: Path) -> None:
        lines = [{"plan": self.plan.written(), "expected": self.expected}, *map(asdict, self.events)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    @property
    def violations(self) -> list[str]:
        return violations(self.events, self.expected)


def read(file: Path) -> Record:
    """A saved record."""
    head, *lines = map(json.loads, file.read_text().splitlines())
    expected = {name: tuple(tokens) for name, tokens in head["expected"].items()}
    events = [Event(**{**line, "tokens": tuple(line["tokens"])}) for line in lines]
    return Record(Plan.read(head["plan"]), expected, events)


def violations(events: Sequence[Event], expected: Mapping[str, Sequence[int]]) -> list[str]:
    """What the history breaks, a line each; none if every stream is right.

    Args:
        expected: the tokens of plain decoding by stream.
    """
    shown: dict[str, list[int]] = defaultdict(list)
    ends: dict[str, list[str]] = {name: [] for name in expected}
    found = []
    for event in events:
        if event.kind not in (TOKENS, DONE, FAILED):
            continue
        name = event.stream
        if name not in expected:
            found.append(f"{name}: nobody asked for it")
            continue
        if ends[name]:
            found.append(f"{name}: {event.kind} after its end")
        if event.kind == TOKENS:
            shown[name] += event.tokens
            if shown[name] != list(expected[name])[: len(shown[name])]:
                found.append(f"{name}: other tokens than plain decoding after {event.at:.3f} s")
        else:
            ends[name].append(event.kind)
            if event.kind == DONE and shown[name] != list(expected[name]):
                found.append(f"{name}: ended as a whole after {len(shown[name])} of {len(expected[name])} tokens")
            if event.kind == FAILED and not event.text:
                found.append(f"{name}: failed without a word")
    found += [event.text for event in events if event.kind == UNSETTLED]
    return found + [f"{name}: no end" for name, kinds in ends.items() if not kinds]
