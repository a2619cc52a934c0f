"""Makes requests of prompts: token ids, seed, and how long the answer may be. Every contestant of a round gets the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.never_slower.builtin_prompts import news
from benchmarks.never_slower.cells import LONG, GridCell
from benchmarks.never_slower.kinds import KindOrder, PromptPool
from services.api.messages import ChatMessage
from services.router.tokens import Tokens
from speculation.errors import ConfigurationError

LONG_TOKENS = 4096
# Prompts in a row that may be too long before a kind counts as one that does not fit.
_MOST_TOO_LONG = 200
# Steps of the golden ratio are spread evenly, however many there are.
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRequest:
    """One request of a load. ``name`` says which: equal names are equal requests."""

    name: str
    token_ids: tuple[int, ...]
    seed: int
    max_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """What requests are made like.

    Attributes:
        max_tokens: most tokens of an answer. Answers are cut between half of it and this, so that they do not end together.
        max_model_len: most tokens of prompt and answer together.
        long_tokens: length of a long prompt.
    """

    max_tokens: int
    max_model_len: int
    seed: int = 1
    long_tokens: int = LONG_TOKENS


class RoundRequests:
    """The requests of one round, made when they are first asked for.

    Args:
        start: where in the pool the round begins.
    """

    def __init__(self, pool: PromptPool, tokens: Tokens, limits: RequestLimits, cell: GridCell, start: int) -> None:
        self._pool, self._tokens, self._limits, self._cell, self._start = pool, tokens, limits, cell, start
        self._made: dict[tuple[str, int], LoadRequest | None] = {}

    def supply(self, change_every_s: float) -> Callable[[float], LoadRequest]:
        """The round's requests from the first one on, given the seconds since the load began to be measured.

        The function raises:
            ConfigurationError: the model's context is too short for the prompts.
        """
        order = KindOrder(self._cell.kind, change_every_s, self._start)

        def following(elapsed_s: float) -> LoadRequest:
            for _ in range(_MOST_TOO_LONG):
                if (request := self._request(*order.take(elapsed_s))) is not None:
                    return request
            raise ConfigurationError(
                f"prompts of kind {self._cell.kind} and --max-tokens {self._limits.max_tokens} exceed "
                f"{self._limits.max_model_len}, the longest context here"
            )

        return following

    def prepare(self, count: int) -> None:
        """Make the first ``count`` requests, so that no contestant waits for them."""
        following = self.supply(1.0)
        for _ in range(count):
            following(0.0)

    def _request(self, kind: str, number: int) -> LoadRequest | None:
        """None: it does not fit into the context."""
        if (kind, number) not in self._made:
            self._made[kind, number] = self._make(kind, number)
        return self._made[kind, number]

    def _make(self, kind: str, number: int) -> LoadRequest | None:
        prompt = self._pool.prompt(kind, self._start, number)
        ids = self._encode(prompt.text)
        if self._cell.length == LONG:
            ids = self._encode(self._behind_notes(prompt.text, self._limits.long_tokens - len(ids), number))
        limits = self._limits
        if len(ids) + limits.max_tokens > limits.max_model_len:
            return None
        spared = int((_GOLDEN * (number + 1) % 1.0) * limits.max_tokens / 2)
        seed = limits.seed + self._start + number
        return LoadRequest(name=prompt.name, token_ids=ids, seed=seed, max_tokens=max(2, limits.max_tokens - spared))

    def _encode(self, text: str) -> tuple[int, ...]:
        """Encode with the model's chat template; a base model, which has none, continues the text."""
        if self._tokens.has_chat_template:
            return self._tokens.encode_chat([ChatMessage(role="user", content=text)])
        return self._tokens.encode(text)

    def _behind_notes(self, text: str, room: int, number: int) -> str:
        """The text behind about ``room`` tokens of notes that no other request has."""
        notes: list[str] = []
        first = 1000 * (self._start + number)
        while room > 0:
            notes.append(news(first + len(notes)))
            room -= len(self._tokens.encode(notes[-1])) + 1
        return "Notes:\n" + "\n".join(notes[:-1]) + f"\n\nWith these notes in mind:\n\n{text}" if len(notes) > 1 else text
