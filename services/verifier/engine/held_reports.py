"""Reports of several steps, joined into one that says the same: as if one pass had verified one larger tree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from services.verifier.engine.kept_features import pieces
from speculation import limits
from speculation.messages import StepReport
from speculation.tree import ROOT
from speculation.types import Features, Observation, TokenTree

# The source of all nodes of a joined tree: drafters do not need to know who drafted what, and names are few in a message.
_JOINED = "joined"


class HeldReports:
    """One request's reports that one origin has not been sent yet, and the hidden states that belong to them."""

    def __init__(self) -> None:
        self._report: StepReport | None = None
        self._features: list[Features] = []

    def __bool__(self) -> bool:
        return self._report is not None

    def fits(self, report: StepReport) -> bool:
        """Whether ``report`` and those held fit into one message."""
        if self._report is None:
            return True
        nodes = _nodes(self._report) + 1 + _nodes(report)
        tokens = len(self._report.committed) + len(report.committed)
        return nodes <= limits.MAX_TREE_NODES and tokens <= limits.MAX_TREE_NODES + 1

    def add(self, report: StepReport, features: Features | None) -> None:
        """Hold a report.

        Args:
            report: without hidden states.
            features: those that belong to it.
        """
        self._report = report if self._report is None else joined(self._report, report)
        if features is not None:
            self._features.append(features)

    def take(self) -> tuple[Iterable[Features], StepReport]:
        """What is held, which is dropped: hidden states to send first, and the report. There must be one."""
        report, features = self._report, list(pieces(self._features, limits.MAX_FEATURE_BYTES))
        assert report is not None
        self.drop()
        if features:
            observation = replace(report.observation or Observation(), features=features.pop())
            report = replace(report, observation=observation)
        return features, report

    def drop(self) -> None:
        """Hold nothing any more."""
        self._report, self._features = None, []


def joined(first: StepReport, second: StepReport) -> StepReport:
    """One report of two steps that followed each other, both without hidden states.

    The second step's tree hangs on the first one's last token, which was its pending token: that becomes an accepted node.
    """
    shift = _nodes(first) + 1
    path = (*first.accepted_path, shift - 1, *(node + shift for node in second.accepted_path))
    observation = None
    if first.observation is not None and second.observation is not None:
        observation = _joined(first.observation, second.observation, first.committed[-1], first.accepted_path)
    return replace(second, committed=first.committed + second.committed, accepted_path=path, observation=observation)


def _joined(first: Observation, second: Observation, pending: int, path: tuple[int, ...]) -> Observation | None:
    if not first.top_ids or not second.top_ids:
        return None
    shift = len(first.tree) + 1
    tree = TokenTree(
        tokens=(*first.tree.tokens, pending, *second.tree.tokens),
        parents=(
            *first.tree.parents,
            path[-1] if path else ROOT,
            *(parent + shift for parent in second.tree.parents),
        ),
        sources=(_JOINED,) * (shift + len(second.tree)),
        probes=(*first.tree.probes, *(node + shift for node in second.tree.probes)),
    )
    # The ids after the second step's pending token are those after the node that it has become.
    return Observation(tree=tree, top_ids=first.top_ids + second.top_ids, probe_ids=first.probe_ids + second.probe_ids)


def _nodes(report: StepReport) -> int:
    """Nodes of the verified tree, or at least as many as the accepted path needs if the tree was not observed."""
    observed = 0 if report.observation is None else len(report.observation.tree)
    return max(observed, max(report.accepted_path, default=-1) + 1)
