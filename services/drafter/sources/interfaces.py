"""The interfaces of sources of drafts: two kinds of text sources, and models.

Text sources draft from token ids alone, in well under a millisecond. Some propose whole trees (``TreeSession``), as in the
papers. Others tell what may follow any path, their own or another source's (``PathSession``); the blend asks them at every
node that it adds. Models draft for many requests in one call.

A source is made when a request first names it, by the function that its ``SourceSpec`` names. All text sources share one
thread, and every model has a thread of its own. Calls run one at a time, so no source needs a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from services.drafter.sessions.known_states import KnownStates
from speculation.messages import Continuation, OpenSession, RetrievalQuery, StepReport
from speculation.types import TokenTree


class SourceSession(Protocol):
    """One source's state for one request. It can be built from ``OpenSession.tokens`` at any time of the request."""

    def observe(self, report: StepReport) -> None:
        """Learn what a step committed and what its pass showed."""
        ...

    def close(self) -> None:
        """End the session: the request has ended."""
        ...


class TreeSession(SourceSession, Protocol):
    """A session that proposes trees."""

    def draft(self, max_nodes: int) -> TokenTree:
        """Propose what may follow everything seen so far, in at most ``max_nodes`` nodes."""
        ...


class PathSession(SourceSession, Protocol):
    """A session that is asked node by node. A place stands for the text and a path behind it; callers do not look inside."""

    def start(self) -> Any:
        """The place at the end of everything seen so far; None if the source can say nothing yet."""
        ...

    def follow(self, place: Any, token: int) -> Any:
        """The place one token further; None if the source knows nothing about it."""
        ...

    def candidates(self, place: Any) -> Iterable[tuple[int, str]]:
        """What may come next: tokens, each with its kind, likeliest first. The calibrator learns the value of a kind."""
        ...

    def catch_up(self) -> bool:
        """Do deferred work for a few milliseconds; returns whether more is left. Drafts lack what is not done yet."""
        ...


class LookingUp(Protocol):
    """Sessions of sources with ``SourceSpec.retrieval`` implement this too: they are given hits before they draft."""

    def query(self) -> RetrievalQuery | None:
        """The next query to the index; None: no query."""
        ...

    def found(self, hits: Sequence[Continuation]) -> None:
        """Take what the index found for the query."""
        ...


class TextSource(Protocol):
    """Makes sessions of a text source, and holds what several requests share (a table, a datastore)."""

    @property
    def prior(self) -> Mapping[str, float] | None:
        """None if sessions are ``TreeSession``. If they are ``PathSession``: for each kind of candidate, the probability to
        come next that is assumed until something has been learnt."""
        ...

    def open(self, message: OpenSession) -> SourceSession:
        """Start a session."""
        ...

    def forget(self, tenant: str) -> None:
        """Delete everything about a tenant's requests. Live ones go on, and leave nothing behind."""
        ...


class TreeSource:
    """Base of text sources that propose trees and keep nothing beyond a request."""

    prior: Mapping[str, float] | None = None

    def forget(self, tenant: str) -> None:
        """Nothing is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftWanted:
    """One request's part of a batch that a model drafts.

    Attributes:
        session: what the model's ``open`` returned for the request.
        max_nodes: most nodes of its tree.
        min_probability: paths less likely than this are not worth their rows, see ``StepReport``.
        states: hidden states of ``SourceSpec.layers`` at its committed positions. Those that have not arrived are missing;
            more may arrive while the model drafts.
    """

    session: Any
    max_nodes: int
    min_probability: float = 0.0
    states: KnownStates


class ModelSource(Protocol):
    """A model that drafts, on any device. Its sessions are ``SourceSession``s."""

    def open(self, message: OpenSession) -> SourceSession:
        """Start a session; nothing is computed yet."""
        ...

    def draft(self, batch: Sequence[DraftWanted]) -> Sequence[TokenTree | None]:
        """Draft for several requests at once: one tree for each, in their order. It may take long.

        Returns:
            None for a request that it cannot draft for yet: it waits for hidden states, or still reads the text. An empty
            tree says that it has nothing to propose.
        """
        ...

    def forget(self, tenant: str) -> None:
        """As ``TextSource.forget``."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AheadWanted:
    """One request's part of a batch of drafts made ahead: ``session``, ``max_nodes``, ``min_probability`` as in
    ``DraftWanted``.

    Attributes:
        most: most outcomes of the step under way to draft for.
    """

    session: Any
    max_nodes: int
    min_probability: float
    most: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ahead:
    """A draft for the text with ``assumed``, tokens that the step under way is likely to commit."""

    assumed: tuple[int, ...]
    tree: TokenTree


@runtime_checkable
class DraftsAhead(Protocol):
    """Models that use the time of the target's pass implement this too (speculative speculative decoding, 2603.03251)."""

    def draft_ahead(self, batch: Sequence[AheadWanted], go_on: Callable[[], bool]) -> Sequence[Sequence[Ahead]]:
        """Draft for likely outcomes of the steps that the sessions' last drafts are for, the likeliest first.

        Args:
            go_on: asked between passes of the model; if not, what has been drafted so far is all.

        Returns:
            For each request; none where its last draft is not for its present text.
        """
        ...
