"""What a request's grammar allows after its committed tokens, and after any path of drafted ones below them.

What is allowed is a function of the grammar, the committed tokens and the path alone. So masks keep answers lossless:
whatever was drafted, the target chooses the tokens of constrained plain decoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher

from services.verifier.model.target_port import PackedBits
from speculation.errors import Internal, OutriderError

_Answer = TypeVar("_Answer")
# Begins the engine's words where the grammar lets an answer neither go on nor end.
_NO_WAY_ON = "NoExtension"


class _GaveUpError(Exception):
    """The engine has reached a limit; what it says from then on is not what the grammar says."""


class _NowhereError(Exception):
    """The grammar lets an answer neither go on nor end."""


class GrammarState:
    """Implements ``target_port.TokenRule`` for one request. Used by one thread at a time.

    Args:
        fresh: gives a matcher that has consumed nothing.
        eos_token_ids: the tokens that may follow a complete answer, and nothing else may follow them.
        refused: makes the error for a grammar that asks too much of the engine or leads nowhere, from words that say so.
        anew: compiles the grammar anew and gives such a matcher. All copies of one matcher share the engine's limits, so
            that other requests may have used them up. None: nobody shares this one's.
    """

    def __init__(
        self,
        fresh: Callable[[], LLMatcher],
        eos_token_ids: frozenset[int],
        refused: Callable[[str], OutriderError],
        anew: Callable[[], LLMatcher] | None = None,
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self._fresh = fresh
        self._anew = anew
        self._refused = refused
        self._matcher = fresh()
        self._committed: list[int] = []
        # Tokens below the committed ones that the matcher has consumed at the moment.
        self._entered: list[int] = []
        self._forces = True
        # After paths below the committed tokens.
        self._masks: dict[tuple[int, ...], PackedBits | None] = {}
        self._spent_s = 0.0

    def from_beginning(self) -> GrammarState:
        """The state before the answer."""
        return GrammarState(self._fresh, self.eos_token_ids, self._refused, self._anew)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the block's running time to what the grammar takes."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s += time.perf_counter() - start

    def take_seconds(self) -> float:
        """Seconds that masks and drafts took since the last call."""
        spent, self._spent_s = self._spent_s, 0.0
        return spent

    def commit(self, tokens: Sequence[int]) -> None:
        """Append ``tokens`` to the answer. An end-of-text token is its last.

        Raises:
            Internal: the grammar forbids one of them.
            InvalidArgument: the grammar asks too much of the engine, or led nowhere before them.
        """
        self._masks.clear()
        for token in tokens:
            if token in self.eos_token_ids:
                return
            self._committed.append(token)
            if self._matcher.try_consume_tokens([token]) != 1:
                self._matcher = self._replayed()

    def allowed(self, path: Sequence[int]) -> PackedBits | None:
        key = tuple(path)
        if key not in self._masks:
            with self.timed():
                self._masks[key] = self._computed(key)
        return self._masks[key]

    def _computed(self, path: tuple[int, ...]) -> PackedBits | None:
        try:
            return self._within_limits(lambda: self._mask_after(path))
        except _NowhereError as error:
            # What was only drafted may never be taken.
            if path:
                return None
            raise self._refused(str(error)) from None

    def enter(self, token: int) -> bool:
        """Go on to the state after ``token``; False if the grammar forbids it here.

        Raises:
            InvalidArgument: the grammar asks too much of the engine.
        """
        return token not in self.eos_token_ids and self._within_limits(lambda: self._enter(token))

    def _within_limits(self, ask: Callable[[], _Answer]) -> _Answer:
        """What ``ask`` says of the grammar, by a matcher that has not reached the engine's limits."""
        try:
            return ask()
        except _GaveUpError:
            # Other paths have used up the engine's limits: alone, the answer may still be within them.
            self._matcher = self._replayed()
        try:
            return ask()
        except _GaveUpError as error:
            if self._anew is None:
                raise self._refused(str(error)) from None
        self._matcher = self._compiled_anew()
        try:
            return ask()
        except _GaveUpError as error:
            raise self._refused(str(error)) from None

    def _enter(self, token: int) -> bool:
        if self._matcher.try_consume_tokens([token]) == 1:
            self._entered.append(token)
            return True
        if not self._forbids(token):
            raise _GaveUpError(self._matcher.get_error() or "it refuses a token that the grammar allows")
        return False

    def _forbids(self, token: int) -> bool:
        """Whether the grammar forbids a token here, which the engine refuses: at its limits it refuses any."""
        path = tuple(self._entered)
        if self._masks.get(path) is None:
            try:
                self._masks[path] = self._mask(len(self._committed) + len(path))
            except _NowhereError:
                return True
        bits = self._masks[path]
        return bits is None or token >> 3 >= len(bits) or not bits[token >> 3] >> (token & 7) & 1

    def leave(self, tokens: int = 1) -> None:
        """Go back to the state before the last ``tokens`` that were entered."""
        if tokens:
            del self._entered[-tokens:]
            if not self._matcher.rollback(tokens):
                self._matcher = self._replayed()

    def forced(self, most: int) -> list[int]:
        """The tokens, at most ``most``, that the grammar demands next: at each of them, ``allowed`` leaves no other."""
        if not self._forces or self._matcher.is_stopped():
            return []
        tokens = self._matcher.compute_ff_tokens()
        if self._matcher.is_error():
            # It demands more than the engine cares to say. The search for it is not worth its time.
            self._forces = False
            self._matcher = self._replayed()
            return []
        return tokens[:most]

    def _mask_after(self, path: tuple[int, ...]) -> PackedBits | None:
        entered = 0
        try:
            for token in path:
                if token in self.eos_token_ids or not self._enter(token):
                    return None
                entered += 1
            return self._mask(len(self._committed) + entered)
        finally:
            self.leave(entered)

    def _mask(self, length: int) -> PackedBits:
        self._check()
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        ends = any(bits[token >> 3] >> (token & 7) & 1 for token in self.eos_token_ids)
        if bits.any() and (not ends or self._matcher.is_accepting()):
            return bits
        # An answer that cannot go on is ended by the engine, complete or not.
        words = self._matcher.get_error() or self._matcher.stop_reason()
        if not words.startswith(_NO_WAY_ON):
            raise _GaveUpError(words)
        raise _NowhereError(f"it allows no token after {length} tokens of the answer")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _GaveUpError(self._matcher.get_error())

    def _replayed(self) -> LLMatcher:
        """A new matcher that has consumed the committed tokens, and those entered below them."""
        matcher, tokens = self._fresh(), [*self._committed, *self._entered]
        taken = matcher.try_consume_tokens(tokens)
        if taken == len(tokens):
            return matcher
        if self._anew is not None:
            return self._compiled_anew()
        # At its limits the engine refuses tokens as if they were forbidden, and says why when it is asked for more.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise self._refused(matcher.get_error())
        if not any(matcher.compute_bitmask()):
            raise self._refused(f"it allows no token after {taken} tokens of the answer")
        raise Internal(f"token {tokens[taken]}, number {taken + 1} of the answer, is not allowed by its grammar")

    def _compiled_anew(self) -> LLMatcher:
        """As ``_replayed``, with limits that this request shares with nobody; there is no second time."""
        assert self._anew is not None
        own, self._anew = self._anew(), None
        self._fresh = own.deep_copy
        return self._replayed()
