"""The source that proposes nothing: plain decoding, as a source like any other."""

from __future__ import annotations

from services.drafter.config import DrafterConfig
from services.drafter.sources.interfaces import TreeSource
from speculation.messages import OpenSession, StepReport
from speculation.types import EMPTY_TREE, TokenTree


def make(config: DrafterConfig) -> Autoregressive:
    """For ``catalogue.MAKERS``."""
    return Autoregressive()


class Autoregressive(TreeSource):
    """Source and session at once: there is no state, and every tree is empty."""

    def open(self, message: OpenSession) -> Autoregressive:
        return self

    def draft(self, max_nodes: int) -> TokenTree:
        return EMPTY_TREE

    def observe(self, report: StepReport) -> None:
        """Nothing is learnt."""

    def close(self) -> None:
        """Nothing was kept."""
