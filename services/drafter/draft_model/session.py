"""One request's state in a draft model: its text in the model's own tokens, the cache, and when its drafts end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.drafter.draft_model.next_tokens import Distribution
from services.drafter.draft_model.text_cache import HeldRows, TextCache
from services.drafter.draft_model.vocabulary_map import VocabularyMap
from services.drafter.stopping.interface import StopState
from speculation.messages import OpenSession, StepReport
from speculation.types import TokenTree


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeDraft:
    """A draft, and the tokens of its chain."""

    tree: TokenTree
    chain: Sequence[int]


class LmSession:
    """Implements ``SourceSession``.

    Args:
        held: where its model keeps keys and values.

    Attributes:
        tokens: all committed tokens.
        prompt_length: how many of them are the prompt's.
        cache: rows of the text from some token on, and of its drafts.
        distribution: how its tokens are chosen.
        sampled: whether its drafts are drawn from q.
        stop: decides how long its drafts get.
        draft: the draft for the present text, if there is one.
    """

    def __init__(self, message: OpenSession, held: HeldRows, vocabulary: VocabularyMap, stop: StopState) -> None:
        self.tokens = list(message.tokens)
        self.prompt_length = message.prompt_length
        self.cache = TextCache(held)
        self.vocabulary = vocabulary
        self.distribution = Distribution(message.temperature, message.noise, vocabulary.targets)
        self.sampled = message.sampled and message.temperature > 0
        self.stop = stop
        self.draft: MadeDraft | None = None
        self._ids = vocabulary.encode(self.tokens)
        self._base = 0
        self._chain: Sequence[int] = ()
        self._right = 0
        # Drafts made ahead, by the tokens behind a text of so many tokens that they follow.
        self._ahead: Mapping[tuple[int, ...], MadeDraft] = {}
        self._ahead_of = 0

    def observe(self, report: StepReport) -> None:
        self.draft = None
        self.tokens += report.committed
        self._ids += self.vocabulary.encode(report.committed)
        self._judge(report.committed)

    def close(self) -> None:
        self.cache.clear()

    def behind(self, longest: int, spare: int) -> list[int]:
        """Roll the cache back to the committed text; returns the tokens of the text without rows, at least the last one.

        A text longer than ``longest`` rows begins anew with its last half of that: computing these rows once more costs
        little for each of the tokens that then have room.

        Args:
            spare: rows that drafts need behind the text.
        """
        if len(self._ids) - self._base + spare > longest:
            self._base = len(self._ids) - min(len(self._ids), (longest - spare) // 2 + 1)
            self.cache.restart()
        text = self._ids[self._base :]
        return text[self.cache.keep(text) :] if text else []

    def begin(self) -> int:
        """Begin a draft; returns the most tokens that its chain may have."""
        if self._right:
            self.stop.observe(self._right, self._right)
        self._chain, self._right = (), 0
        return self.stop.begin(len(self.tokens) - self.prompt_length)

    def drafted(self, made: MadeDraft) -> None:
        """Note the draft, to be judged by what is committed: the target's tokens do not depend on it."""
        self.draft, self._chain = made, made.chain

    def drafted_ahead(self, made: Mapping[tuple[int, ...], MadeDraft]) -> None:
        """Keep whole drafts that were made for outcomes of the step under way."""
        self._ahead, self._ahead_of = made, len(self.tokens)

    def made_ahead(self) -> MadeDraft | None:
        """The draft that was made ahead for the present text."""
        return self._ahead.get(tuple(self.tokens[self._ahead_of :]))

    def _judge(self, committed: Sequence[int]) -> None:
        for token in committed:
            if self._right == len(self._chain):
                break
            if token != self._chain[self._right]:
                self._end(self._right)
                return
            self._right += 1
        if self._chain and self._right == len(self._chain):
            self._end(self._right)

    def _end(self, accepted: int) -> None:
        self.stop.observe(len(self._chain), accepted)
        self._chain, self._right = (), 0
