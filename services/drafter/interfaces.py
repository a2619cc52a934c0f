"""What a source of drafts is: two kinds of text sources, and models.

Text sources draft from token ids alone, in well under a millisecond. Some propose whole trees (``TreeSession``): the papers'
forms. Others say what follows any path, their own or another source's (``PathSession``): the blend asks them at every node
that it adds. Models draft for many requests in one call.

A source is made when a request first names it, by the function that its ``SourceSpec`` names. Everything of text sources
runs in one thread, and everything of a model in another of its own, call by call: no source needs a lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.drafter.known_states import KnownStates
from speculation.messages import Continuation, OpenSession, RetrievalQuery, StepReport
from speculation.types import TokenTree


class SourceSession(Protocol):
    """One source's state for one request. Restored from ``OpenSession.tokens`` however late it joins."""

    def observe(self, report: StepReport) -> None:
        """Learn what a step committed and what its pass showed."""
        ...

    def close(self) -> None:
        """The request has ended: forget it."""
        ...


class TreeSession(SourceSession, Protocol):
    """A session that proposes trees."""

    def draft(self, max_nodes: int) -> TokenTree:
        """Propose what may follow everything seen so far, in at most ``max_nodes`` nodes."""
        ...


class PathSession(SourceSession, Protocol):
    """A session that is asked node by node. A place is opaque: the text and a path."""

    def start(self) -> Any:
        """The place at the end of everything seen so far."""
        ...

    def follow(self, place: Any, token: int) -> Any:
        """The place one token further; None where the source knows nothing any more."""
        ...

    def candidates(self, place: Any) -> Iterable[tuple[int, str]]:
        """What may come next: tokens, each with its kind, likeliest first. What a kind is worth is learnt."""
        ...

    def catch_up(self) -> bool:
        """Do some of the work that was put off, for a few milliseconds; whether there is more. Until then drafts lack it."""
        ...


class LookingUp(Protocol):
    """What the sessions of sources with ``SourceSpec.retrieval`` do besides: they are given hits before they draft."""

    def query(self) -> RetrievalQuery | None:
        """What is to be looked up; None: nothing."""
        ...

    def found(self, hits: Sequence[Continuation]) -> None:
        """What followed it in the corpus."""
        ...


class TextSource(Protocol):
    """Makes sessions of a text source. What several requests share (a table, a datastore) lives here."""

    @property
    def prior(self) -> Mapping[str, float] | None:
        """None, and sessions are ``TreeSession``; or, and sessions are ``PathSession``, for each kind of candidate the
        probability that it comes next, as long as nothing has been learnt."""
        ...

    def open(self, message: OpenSession) -> SourceSession:
        """Start a session."""
        ...

    def forget(self, tenant: str) -> None:
        """Delete what is remembered of a tenant's requests. Those under way go on, and leave nothing behind."""
        ...


class TreeSource:
    """Base of text sources that propose trees and remember nothing beyond a request."""

    prior: Mapping[str, float] | None = None

    def forget(self, tenant: str) -> None:
        """Nothing is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftWanted:
    """One request's part of a batch that a model drafts.

    Attributes:
        session: what the model's ``open`` has made for the request.
        max_nodes: most nodes of its tree.
        states: hidden states of its committed positions, of ``SourceSpec.layers``; those that have not come are missing,
            and more of them may come while the model drafts.
    """

    session: Any
    max_nodes: int
    states: KnownStates


class ModelSource(Protocol):
    """A model that drafts, on whatever device it is. Its sessions are ``SourceSession``s."""

    def open(self, message: OpenSession) -> SourceSession:
        """Start a session; nothing is computed yet."""
        ...

    def draft(self, batch: Sequence[DraftWanted]) -> Sequence[TokenTree]:
        """Draft for several requests at once: one tree for each, in their order. It may take its time."""
        ...

    def forget(self, tenant: str) -> None:
        """As ``TextSource.forget``."""
        ...
