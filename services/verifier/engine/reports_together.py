"""Sends the reports of several requests to their origin together."""

from __future__ import annotations

from services.verifier.engine.live_request import LiveRequest
from speculation.columns import SentReports
from speculation.ports import DraftLink
from speculation.types import EMPTY_TREE, Verdict


class ReportsToOne:
    """The reports of a step to one origin that wait to be sent."""

    def __init__(self, link: DraftLink) -> None:
        self._link = link
        # Each one's request, verdict, most nodes of the next draft, and their least probability.
        self._held: list[tuple[LiveRequest, Verdict, int, float]] = []

    def add(self, request: LiveRequest, verdict: Verdict, max_nodes: int, least: float) -> None:
        """Hold a report of a step that has been committed to ``request``; it has no hidden states and no probes."""
        self._held.append((request, verdict, max_nodes, least))

    def send(self) -> None:
        """Send those that are held."""
        if not self._held:
            return
        requests, verdicts, max_nodes, least = zip(*self._held, strict=True)
        self._held = []
        seen = [verdict.observation for verdict in verdicts]
        reports = SentReports(
            session_ids=[request.id for request in requests],
            committed=[verdict.committed for verdict in verdicts],
            lengths=[verdict.length for verdict in verdicts],
            prefix_hashes=[request.prefixes.hash for request in requests],
            accepted_paths=[verdict.accepted_path for verdict in verdicts],
            max_nodes=max_nodes,
            min_probabilities=least,
            trees=[EMPTY_TREE if each is None else each.tree for each in seen],
            top_ids=[() if each is None else each.top_ids for each in seen],
        )
        self._link.steps(reports)
