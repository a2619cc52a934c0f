"""Joins the reports of several steps into one, as if one pass had verified one larger tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from services.verifier.engine.kept_features import pieces
from speculation import limits
from speculation.messages import StepReport
from speculation.tree import ROOT
from speculation.types import Features, Observation, TokenTree

# The source of all nodes of a joined tree: drafters do not need to know who drafted what, and names are few in a message.
_JOINED = "joined"


class HeldReports:
    """One request's reports not sent to one origin yet, and the hidden states that belong to them."""

    def __init__(self) -> None:
        self._reports: list[StepReport] = []
        self._features: list[Features] = []
        # Of all reports: tokens, and nodes of the larger tree.
        self._tokens = self._nodes = 0

    def __bool__(self) -> bool:
        return bool(self._reports)

    def fits(self, report: StepReport) -> bool:
        """Whether ``report`` and those held fit into one message."""
        if not self._reports:
            return True
        nodes, tokens = self._nodes + 1 + _nodes(report), self._tokens + len(report.committed)
        return nodes <= limits.MAX_TREE_NODES and tokens <= limits.MAX_TREE_NODES + 1

    def add(self, report: StepReport, features: Features | None) -> None:
        """Hold a report.

        Args:
            report: without hidden states.
            features: those that belong to it.
        """
        self._nodes += _nodes(report) + (1 if self._reports else 0)
        self._tokens += len(report.committed)
        self._reports.append(report)
        if features is not None:
            self._features.append(features)

    def take(self) -> tuple[Iterable[Features], StepReport]:
        """Hand over what is held: hidden states to send first, and the joined report. There must be one."""
        report, features = joined(self._reports), list(pieces(self._features, limits.MAX_FEATURE_BYTES))
        self.drop()
        if features:
            observation = replace(report.observation or Observation(), features=features.pop())
            report = replace(report, observation=observation)
        return features, report

    def drop(self) -> None:
        """Hold nothing any more."""
        self._reports, self._features = [], []
        self._tokens = self._nodes = 0


def joined(reports: Sequence[StepReport]) -> StepReport:
    """One report of steps that followed each other, all without hidden states.

    Each step's tree hangs on its pending token, the last one of the step before. That token becomes an accepted node.
    """
    last = reports[-1]
    if len(reports) == 1:
        return last
    path: list[int] = []
    nodes = 0
    for report in reports:
        if report is not reports[0]:
            path.append(nodes)
            nodes += 1
        path += (node + nodes for node in report.accepted_path)
        nodes += _nodes(report)
    committed = tuple(token for report in reports for token in report.committed)
    return replace(last, committed=committed, accepted_path=tuple(path), observation=_joined_observation(reports))


def _joined_observation(reports: Sequence[StepReport]) -> Observation | None:
    """Of the larger tree. None if a step has none."""
    seen = [report.observation for report in reports if report.observation is not None and report.observation.top_ids]
    if len(seen) < len(reports):
        return None
    tokens: list[int] = []
    parents: list[int] = []
    probes: list[int] = []
    at = ROOT
    for number, (report, observation) in enumerate(zip(reports, seen, strict=True)):
        if number:
            # The pending token of this step.
            tokens.append(reports[number - 1].committed[-1])
            parents.append(at)
            at = len(tokens) - 1
        shift, tree = len(tokens), observation.tree
        tokens += tree.tokens
        parents += (at if parent == ROOT else parent + shift for parent in tree.parents)
        probes += (probe + shift for probe in tree.probes)
        if report.accepted_path:
            at = report.accepted_path[-1] + shift
    sources = (_JOINED,) * len(tokens)
    tree = TokenTree(tokens=tuple(tokens), parents=tuple(parents), sources=sources, probes=tuple(probes))
    # A later step's pending token has become a node. The ids after it are the ids after that node.
    return Observation(
        tree=tree,
        top_ids=tuple(ids for observation in seen for ids in observation.top_ids),
        probe_ids=tuple(ids for observation in seen for ids in observation.probe_ids),
        probe_chances=_joined_chances(seen),
    )


def _joined_chances(seen: Sequence[Observation]) -> tuple[tuple[float, ...], ...]:
    if not any(observation.probe_chances for observation in seen):
        return ()
    own = (observation.probe_chances or ((),) * len(observation.probe_ids) for observation in seen)
    return tuple(chances for each in own for chances in each)


def _nodes(report: StepReport) -> int:
    """Nodes of the verified tree, or at least as many as the accepted path needs if the tree was not observed."""
    observed = 0 if report.observation is None else len(report.observation.tree)
    return max(observed, max(report.accepted_path, default=-1) + 1)
