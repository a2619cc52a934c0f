"""What a source of drafts is."""

from __future__ import annotations

from typing import Protocol

from speculation.messages import OpenSession, StepReport
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


class Source(Protocol):
    """Makes sessions. What several requests share (a model, a datastore) lives here."""

    def open(self, message: OpenSession) -> SourceSession:
        """Start a session."""
        ...
