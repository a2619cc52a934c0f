"""The source that proposes nothing: plain decoding, under the same roof as all others."""

from __future__ import annotations

from speculation.messages import OpenSession, StepReport
from speculation.types import EMPTY_TREE, TokenTree


class Autoregressive:
    """Source and session at once: there is no state."""

    def open(self, message: OpenSession) -> Autoregressive:
        """See ``Source``."""
        return self

    def draft(self, max_nodes: int) -> TokenTree:
        """See ``SourceSession``: the empty tree."""
        return EMPTY_TREE

    def observe(self, report: StepReport) -> None:
        """See ``SourceSession``: nothing is learnt."""

    def close(self) -> None:
        """See ``SourceSession``: nothing was kept."""
