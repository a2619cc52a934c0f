"""The tokens that a request allows by itself: those of a list, and none that completes a bad word."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.verifier.model.target_port import PackedBits, TokenRule
from speculation.errors import InvalidArgument
from speculation.types import SamplingParams


def word_rule(
    params: SamplingParams, vocabulary: int, stop_ids: frozenset[int], below: TokenRule | None = None
) -> WordRule | None:
    """The rule of a request's ``allowed_token_ids`` and ``bad_words``; None: it has neither.

    Raises:
        InvalidArgument: they leave no token, or none to begin with.
    """
    if not params.allowed_token_ids and not params.bad_words:
        return None
    return WordRule(params, vocabulary, stop_ids, below)


class WordRule:
    """Implements ``TokenRule``. As in vLLM, bad words are those of the answer: what the prompt ends in does not count.

    Args:
        stop_ids: tokens that ``min_tokens`` keeps from being chosen.
        below: bars further tokens, such as a grammar.
    """

    def __init__(
        self, params: SamplingParams, vocabulary: int, stop_ids: frozenset[int], below: TokenRule | None = None
    ) -> None:
        self._field = "bad_words" if params.bad_words else "allowed_token_ids"
        self._below = below
        self._min_tokens = params.min_tokens
        usable = np.full(vocabulary, not params.allowed_token_ids)
        usable[list(params.allowed_token_ids)] = True
        usable[[word[0] for word in params.bad_words if len(word) == 1]] = False
        self._usable = _packed(usable)
        usable[[token for token in stop_ids if token < vocabulary]] = False
        self._usable_early = _packed(usable)
        # The last tokens of bad words by the tokens before them, so that a step looks at few of many words.
        self._last = defaultdict[tuple[int, ...], list[int]](list)
        for word in params.bad_words:
            if len(word) > 1:
                self._last[word[:-1]].append(word[-1])
        self._lengths = sorted({*map(len, self._last)})
        self._longest = max(self._lengths, default=0)
        self._length = 0
        # The end of the answer that a bad word may begin in.
        self._tail: tuple[int, ...] = ()
        self._found((), self._bits(()))

    def commit(self, tokens: Sequence[int]) -> None:
        """Append ``tokens`` to the answer."""
        self._length += len(tokens)
        self._tail = self._after(tokens)

    def allowed(self, path: Sequence[int]) -> PackedBits | None:
        bits = self._bits(path)
        if self._below is not None:
            others = self._below.allowed(path)
            if others is None:
                return None
            size = min(len(bits), len(others))
            bits = bits[:size] & others[:size]
        return self._found(path, bits)

    def _bits(self, path: Sequence[int]) -> PackedBits:
        bits = self._usable if self._length + len(path) >= self._min_tokens else self._usable_early
        if not self._lengths:
            return bits
        end = self._after(path)
        begun = (end[len(end) - length :] for length in self._lengths if length <= len(end))
        completed = [token for words in begun for token in self._last.get(words, ())]
        if not completed:
            return bits
        places = np.array(completed)
        bits = bits.copy()
        np.bitwise_and.at(bits, places >> 3, ~(1 << (places & 7)).astype(np.uint8))
        return bits

    def _after(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The end of the answer, with ``tokens`` appended, as long as matters."""
        text = (*self._tail, *tokens)
        return text[max(0, len(text) - self._longest) :]

    def _found(self, path: Sequence[int], bits: PackedBits) -> PackedBits:
        if bits.any():
            return bits
        where = f"after {self._length + len(path)} tokens of the answer nothing is left to choose"
        raise InvalidArgument(self._field, "what was given", f"such that an answer can be given: {where}")


def _packed(usable: NDArray[np.bool_]) -> PackedBits:
    """As the grammar engine: whole words of 32 bits."""
    return np.packbits(np.pad(usable, (0, -len(usable) % 32)), bitorder="little")
