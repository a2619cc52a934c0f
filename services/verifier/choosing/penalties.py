"""Biases, penalties and barred tokens, from counts of tokens; transformers' processors compute the same from a history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.verifier.choosing.reading import READER, LogitsReader
from services.verifier.model.to_device import to_device
from speculation.types import SamplingParams

_Ids = NDArray[np.int64]


class TokenCounts:
    """The distinct tokens of a request's prompt and answer, and how often each occurs in the answer.

    Attributes:
        addresses: of the arrays that ``after`` gives for an empty path, until tokens are added.
    """

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self._place: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._in_answer = np.zeros(64, dtype=np.float32)
        self.addresses = self._ids.ctypes.data, self._in_answer.ctypes.data

    def add(self, position: int, tokens: Sequence[int]) -> None:
        """Count ``tokens``, the first of which is at ``position``, counted from the start of the prompt."""
        for token in dict.fromkeys(tokens):
            if token not in self._place:
                self._append(token)
        for token in tokens[max(0, self._prompt_length - position) :]:
            self._in_answer[self._place[token]] += 1

    def _append(self, token: int) -> None:
        place = len(self._place)
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._in_answer = np.concatenate((self._in_answer, np.zeros_like(self._in_answer)))
            self.addresses = self._ids.ctypes.data, self._in_answer.ctypes.data
        self._place[token] = place
        self._ids[place] = token

    def after(self, path: Sequence[int]) -> tuple[_Ids, NDArray[np.float32]]:
        """Distinct tokens and their counts in the answer, with ``path`` appended to it; callers must not modify them."""
        known = len(self._place)
        if not path:
            return self._ids[:known], self._in_answer[:known]
        new = [token for token in dict.fromkeys(path) if token not in self._place]
        place = {token: known + at for at, token in enumerate(new)}
        counts = np.concatenate((self._in_answer[:known], np.zeros(len(new), dtype=np.float32)))
        for token in path:
            counts[self._place.get(token, place.get(token, 0))] += 1
        return np.concatenate((self._ids[:known], np.array(new, dtype=np.int64))), counts


class Penalties:
    """The changes that one request's parameters make to logits before temperature and truncation.

    Args:
        stop_ids: tokens that ``min_tokens`` keeps from being chosen.
    """

    def __init__(self, params: SamplingParams, prompt_length: int, stop_ids: frozenset[int]) -> None:
        self.presence, self.frequency = np.float32(params.presence_penalty), np.float32(params.frequency_penalty)
        self.repetition = params.repetition_penalty
        self.biased = np.array(list(params.logit_bias), dtype=np.int64)
        self.bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self.barred = np.array(sorted(stop_ids), dtype=np.int64)
        self.barred_until = prompt_length + params.min_tokens if params.min_tokens else 0
        counted = params.repetition_penalty != 1 or bool(params.presence_penalty or params.frequency_penalty)
        self.counts = TokenCounts(prompt_length) if counted else None

    def needed(self, position: int) -> bool:
        """Whether any logit is changed for the token at ``position``."""
        return self.counts is not None or len(self.biased) > 0 or position < self.barred_until

    def changes(self, row: int, vocabulary: int, path: Sequence[int], position: int, into: Changes) -> None:
        """Add the changes to row ``row`` of [rows, ``vocabulary``], for the token at ``position`` after ``path``."""
        start = row * vocabulary
        if len(self.biased):
            into.biases.append((start + self.biased, self.bias))
        if self.counts is not None:
            ids, counts = self.counts.after(path)
            if self.repetition != 1:
                into.repeated.append((start + ids, np.full(len(ids), self.repetition, dtype=np.float32)))
            if self.presence or self.frequency:
                answered = counts > 0
                amount = self.presence + self.frequency * counts[answered]
                into.counted.append((start + ids[answered], -amount))
        if position < self.barred_until:
            into.barred.append((start + self.barred, np.full(len(self.barred), -np.inf, dtype=np.float32)))


_Amounts = list[tuple[_Ids, NDArray[np.float32]]]


@dataclass(slots=True)
class Changes:
    """Changes to the logits of any number of rows: indices into the flattened rows, and amounts."""

    biases: _Amounts
    repeated: _Amounts
    counted: _Amounts
    barred: _Amounts

    def apply(self, logits: torch.Tensor, reader: LogitsReader = READER) -> None:
        """Apply the changes in place, in the order of transformers' ``generate``.

        Args:
            logits: [rows, vocabulary], float32, contiguous, on any device.
        """
        for amounts in (self.biases, self.repeated, self.counted, self.barred):
            if not amounts:
                continue
            at = np.concatenate([ids for ids, _ in amounts])
            amount = np.concatenate([values for _, values in amounts])
            if reader.on_host(logits):
                _change(logits.numpy().reshape(-1), at, amount, self._rule(amounts), np.where)
            else:
                there = to_device(at, logits.device), to_device(amount, logits.device)
                _change(logits.view(-1), *there, self._rule(amounts), torch.where)

    def _rule(self, amounts: _Amounts) -> str:
        return "scale" if amounts is self.repeated else "set" if amounts is self.barred else "add"


def _change(flat: Any, at: Any, amount: Any, rule: str, where: Callable[..., Any]) -> None:
    """Change flattened logits at indices ``at``; works on numpy arrays and torch tensors alike."""
    if rule != "set":
        found = flat[at]
        amount = found + amount if rule == "add" else where(found < 0, found * amount, found / amount)
    flat[at] = amount
