"""The state of one request between passes, and its walk down its tree."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.model_files.generation_config import ModelProcessors
from services.verifier.choosing.penalties import Penalties
from services.verifier.choosing.processors import build_pipeline, build_truncation
from services.verifier.choosing.sought import Draw
from services.verifier.kernels.native.choice_structs import request_struct
from services.verifier.model.target_port import Rows, Sampling, Tried
from services.verifier.model.tree_rows import followed
from speculation.acceptance import stop_token_ids
from speculation.errors import Internal

# A token, or the reason why there is none.
TokenOrError = int | Exception


class RequestState:
    """What the chooser keeps of one request between passes.

    Attributes:
        pipeline: all its processors as one function of a row and its history, if the model's generation config brings some;
            None if ``penalties``, the temperature and ``truncation`` are all.
        address: of the struct that the native kernel reads.
        draw: how it draws, where ranks may do so each in its part; None: it does not, or they may not.
        unchanged: it takes the likeliest token everywhere; ``plain``: and wants no log-probabilities.
        follows: its choices depend on committed tokens.
        history: prompt and answer; kept only for ``pipeline``.
        rule: bars tokens, before temperature and truncation; None: all may be chosen.
    """

    def __init__(self, sampling: Sampling, eos_token_ids: frozenset[int], model: ModelProcessors) -> None:
        self.params = params = sampling.params
        stop_ids = stop_token_ids(params, eos_token_ids)
        self.penalties = Penalties(params, sampling.prompt_length, stop_ids)
        self._struct = request_struct(params, self.penalties)
        self.address = ctypes.addressof(self._struct)
        self.pipeline = None
        if model.shown and not params.ignore_generation_config:
            length = sampling.prompt_length
            self.pipeline = build_pipeline(params, prompt_length=length, stop_ids=stop_ids, model=model)
        self.truncation = build_truncation(params)
        self.rule = sampling.rule
        changes = self.penalties.counts is not None or len(self.penalties.biased) > 0 or self.penalties.barred_until > 0
        as_they_are = not (self.pipeline or self.rule or changes)
        self.unchanged = as_they_are and not params.temperature
        self.plain = self.unchanged and params.logprobs is None
        self.draw = Draw.by(params) if as_they_are and params.logprobs is None else None
        self.follows = self.pipeline is not None or self.penalties.counts is not None
        self.history: list[int] = []
        self._known = 0

    def advance(self, position: int, tokens: Sequence[int]) -> None:
        """Note the tokens committed from ``position`` on; those already known are skipped.

        Raises:
            Internal: tokens before ``position`` are missing.
        """
        if not self.follows:
            return
        if position > self._known:
            raise Internal(f"tokens {self._known} to {position} of a request were never seen")
        new = tokens[self._known - position :]
        if self.penalties.counts is not None:
            self.penalties.counts.add(self._known, new)
        if self.pipeline is not None:
            self.history += new
        self._known += len(new)


class ChoicePoint(NamedTuple):
    """A row of the pass's logits, from which the token at ``position`` is chosen, after the tokens of ``path``."""

    request: RequestState
    row: int
    position: int
    path: tuple[int, ...]


@dataclass(slots=True)
class Walk:
    """One request's rows while its tree is walked. Row 0 is the pending token's, row i + 1 that of node i.

    ``choices``, ``error`` and ``tried`` become those of its ``Outcome``.
    """

    rows: Rows
    request: RequestState
    first_row: int
    choices: list[int] = field(default_factory=list)
    error: Exception | None = None
    tried: tuple[Tried, ...] = ()

    def point(self, row: int) -> ChoicePoint:
        """What is needed to choose after row ``row``."""
        position = self.rows.context + self.rows.chain
        if row == 0:
            return ChoicePoint(self.request, self.first_row, position, ())
        tokens, node, path = self.rows.tokens[self.rows.chain :], row - 1, []
        while node >= 0:
            path.append(tokens[node])
            node = self.rows.parents[node]
        return ChoicePoint(self.request, self.first_row + row, position + len(path), tuple(reversed(path)))

    def follow(self, ids: Sequence[int]) -> bool:
        """Go down the tree by the likeliest token after each row of the pass; False: one that is reached is not known."""
        self.choices, known = followed(self.rows, ids, self.first_row)
        return known

    def take(self, row: int, choice: TokenOrError) -> list[int]:
        """Note the choice after a row; returns the rows of its children that hold the chosen token."""
        if isinstance(choice, Exception):
            self.error = self.error or choice
            return []
        self.choices[row] = choice
        if not self.rows.parents:
            return []
        tokens, parents = self.rows.tokens[self.rows.chain :], self.rows.parents
        return [node + 1 for node, parent in enumerate(parents) if parent == row - 1 and tokens[node] == choice]
