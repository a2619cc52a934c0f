"""What a source of drafts is.

Some sources propose whole trees (``SourceSession``): the papers' forms. Others can say what follows any path, their own or
another source's (``PathSource``): the blend asks them at every node that it adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from speculation.messages import Continuation, OpenSession, RetrievalQuery, StepReport
from speculation.types import TokenTree


class SourceSession(Protocol):
    """One source's state for one request. Restored from ``OpenSession.tokens`` however late it joins."""

    def draft(self, max_nodes: int) -> TokenTree:
        """Propose what may follow everything seen so far, in at most ``max_nodes`` nodes."""
        ...

    def observe(self, report: StepReport) -> None:
        """Learn what a step committed and what its pass showed."""
        ...

    def close(self) -> None:
        """The request has ended."""
        ...


class PathSource(Protocol):
    """One source's state for one request, asked node by node. A place is opaque: the text and a path."""

    def start(self) -> Any:
        """The place at the end of everything seen so far."""
        ...

    def follow(self, place: Any, token: int) -> Any:
        """The place one token further; None where the source knows nothing any more."""
        ...

    def candidates(self, place: Any) -> Iterable[tuple[int, str]]:
        """What may come next: tokens, each with its kind, likeliest first. What a kind is worth is learnt."""
        ...

    def observe(self, report: StepReport) -> None:
        """See ``SourceSession``."""
        ...

    def close(self) -> None:
        """See ``SourceSession``."""
        ...


class Source(Protocol):
    """Makes sessions that propose trees. What several requests share (a model, a datastore) lives here."""

    def open(self, message: OpenSession) -> SourceSession:
        """Start a session."""
        ...


class WalkedSource(Protocol):
    """Makes sessions that are asked node by node.

    Attributes:
        prior: for each kind, the probability that its candidate comes next, as long as nothing has been learnt.
    """

    prior: dict[str, float]

    def open(self, message: OpenSession) -> PathSource:
        """Start a session."""
        ...

    def forget(self, tenant: str) -> None:
        """Delete what is remembered of a tenant's requests. Those under way go on, and leave nothing behind."""
        ...


@runtime_checkable
class Retrieving(Protocol):
    """A session that works with hits of the retrieval index: it is given them before it drafts."""

    def query(self) -> RetrievalQuery | None:
        """What is to be looked up; None: nothing."""
        ...

    def found(self, hits: Sequence[Continuation]) -> None:
        """What followed them in the corpus."""
        ...
