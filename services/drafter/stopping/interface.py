"""What a policy for the length of drafts is, and what it is told.

A policy only ever stops *after* a token, or before the first. It never takes back a token that was drawn: under
``acceptance: rejection`` that would bias the output (a token drawn from q, then dropped for being unlikely, no longer comes
from q).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from speculation.messages import OpenSession

# How many of the largest probabilities policies that read distributions are given (DISCO, section 4: k = 10).
TOP = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftedToken:
    """A token that was just drafted, and the distribution that it comes from.

    Attributes:
        token: its id.
        step: its index in the draft, from 0.
        position: its index in the answer, from 0: the number of generated tokens before it, drafted ones included.
        probability: its own probability in the draft distribution.
        path_probability: product of the probabilities of the draft's tokens so far, its own included.
        top: the ``TOP`` largest probabilities of the distribution, descending; fewer if the vocabulary is smaller. Empty
            where the policy does not read them (``StopPolicy.reads_distribution``).
        entropy: of the distribution, in nats; 0 where the policy does not read it.
    """

    token: int
    step: int
    position: int
    probability: float
    path_probability: float
    top: Sequence[float] = ()
    entropy: float = 0.0


class StopState(Protocol):
    """A policy's state for one request. Calls come in this order: ``begin``, ``more`` for each token, ``observe``.

    Only a draft that the target has checked, wholly or in part, is followed by ``observe``, once. Other drafts are replaced
    by the next ``begin``, and steps without a draft are not reported.
    """

    def begin(self, position: int) -> int:
        """Start a draft behind ``position`` generated tokens.

        Returns:
            The most tokens that it may have; 0: draft nothing (a step of plain decoding).
        """
        ...

    def more(self, drafted: DraftedToken) -> bool:
        """Whether to draft another token behind this one. Asked for every token, also for the last that ``begin`` allows."""
        ...

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn that the target checked the first ``drafted`` tokens of the draft, and accepted ``accepted`` of them."""
        ...


class StopPolicy(Protocol):
    """Decides how long drafts are. Made once for a source; it may learn over requests, but keeps no text."""

    @property
    def reads_distribution(self) -> bool:
        """Whether ``more`` reads ``DraftedToken.top`` and ``entropy``, which cost a pass over the vocabulary."""
        ...

    def open(self, message: OpenSession) -> StopState:
        """Start a request."""
        ...
