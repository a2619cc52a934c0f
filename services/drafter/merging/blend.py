"""The blend: one tree of the likeliest paths from all sources.

All sources are asked at every node, so one source may continue a path that another has begun. A heap holds the open
candidates by the probability of their whole path. The likeliest becomes a node, and its own candidates join the heap. A
path is never likelier than its beginning, so the result is the most probable tree of its size.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.drafter.merging.calibrator import Calibrator, Candidate
from services.drafter.sessions.tree_walk import TreeWalk
from services.drafter.sources.interfaces import PathSession
from speculation.messages import StepReport
from speculation.tree import ROOT
from speculation.types import TokenTree

log = logging.getLogger(__name__)

# Paths less likely than this are never drafted.
LEAST = 2e-4

Places = tuple[tuple[str, Any], ...]


class BlendSession:
    """Implements ``TreeSession`` over several sources, or one.

    Args:
        sources: by name, in the order in which they are asked.
        calibrator: shared by all sessions.
        models: models that take part as soon as their trees for a prefix have arrived (``take``), in any order.
        joint: gives the calibrator of drafts in which these models take part: beside them, the others are worth less.
    """

    def __init__(
        self,
        sources: Mapping[str, PathSession],
        calibrator: Calibrator,
        models: Mapping[str, TreeWalk] | None = None,
        joint: Callable[[tuple[str, ...]], Calibrator] | None = None,
    ) -> None:
        self._models = dict(models or {})
        self._sources: dict[str, PathSession] = {**sources, **self._models}
        self._alone, self._joint = calibrator, joint or (lambda _: calibrator)
        # The model that has spoken last.
        self._latest = ""
        # The one of the last draft.
        self._calibrator = calibrator
        self._least = LEAST
        # Of the last draft: the candidates after each node, and the child of each (node, token).
        self._options: dict[int, list[Candidate]] = {}
        self._nodes: dict[tuple[int, int], int] = {}

    def take(self, name: str, tree: TokenTree) -> None:
        """Let a model take part in further drafts for the present prefix.

        What it names as well as another model, and no other source, counts as its own in them. The draft before has the
        other's, so that both together tell what each adds.
        """
        self._models[name].take(tree)
        self._latest = name

    def draft(self, max_nodes: int) -> TokenTree:
        return self.draft_after((), max_nodes)

    def draft_after(self, assumed: Sequence[int], max_nodes: int) -> TokenTree:
        """A tree of what may follow everything seen so far and then ``assumed``."""
        places = self._start()
        models = tuple(name for name, _ in places if name in self._models)
        self._calibrator = self._joint(models) if models else self._alone
        for token in assumed:
            places = self._follow(places, token)
        return self._grow(places, max_nodes, ahead=bool(assumed))

    def likeliest_after(self, node: int) -> list[tuple[int, float]]:
        """What may follow a node of the last draft: tokens and probabilities, likeliest first."""
        options = self._options.get(node, [])
        rated = zip((token for token, _ in options), self._calibrator.probabilities(options), strict=True)
        return sorted(rated, key=lambda each: -each[1])

    def observe(self, report: StepReport) -> None:
        self._learn(report.committed)
        self._least = max(LEAST, report.min_probability)
        for name, source in list(self._sources.items()):
            try:
                source.observe(report)
            except Exception:
                self._lose(name)

    def catch_up(self) -> bool:
        """As ``PathSession.catch_up``."""
        more = False
        for name, source in list(self._sources.items()):
            try:
                more |= source.catch_up()
            except Exception:
                self._lose(name)
        return more

    def close(self) -> None:
        for source in self._sources.values():
            source.close()

    def _start(self) -> Places:
        places = []
        for name, source in list(self._sources.items()):
            try:
                place = source.start()
            except Exception:
                self._lose(name)
                continue
            if place is not None:
                places.append((name, place))
        return tuple(places)

    def _learn(self, committed: Sequence[int]) -> None:
        """Learn from the last draft what came, and forget it."""
        node: int | None = ROOT
        for token in committed:
            if node is None or node not in self._options:
                break
            self._calibrator.learn(self._options[node], token)
            node = self._nodes.get((node, token))
        self._options, self._nodes = {}, {}

    def _grow(self, start: Places, max_nodes: int, *, ahead: bool) -> TokenTree:
        """The tree behind ``start``; ``ahead``: that is not the committed text's end."""
        options: dict[int, list[Candidate]] = {}
        nodes: dict[tuple[int, int], int] = {}
        if not ahead:
            # Only a draft that follows the committed text is learnt from.
            self._options, self._nodes = options, nodes
        tokens: list[int] = []
        parents: list[int] = []
        sources: list[str] = []
        scores: list[float] = []
        # (minus the path's probability, order of insertion, parent, token, source that named it, the parent's places)
        heap: list[tuple[float, int, int, int, str, Places]] = []
        pushed = 0

        def unfold(node: int, places: Places, probability: float) -> None:
            nonlocal pushed
            found, namers = self._ask(places)
            options[node] = found
            least = self._least
            for (token, _), each, namer in zip(found, self._calibrator.probabilities(found), namers, strict=True):
                if probability * each > least:
                    pushed += 1
                    heapq.heappush(heap, (-probability * each, pushed, node, token, namer, places))

        if max_nodes:
            unfold(ROOT, start, 1.0)
        while heap and len(tokens) < max_nodes:
            negative, _, parent, token, namer, places = heapq.heappop(heap)
            nodes[parent, token] = len(tokens)
            tokens.append(token)
            parents.append(parent)
            sources.append(namer)
            scores.append(-negative)
            unfold(len(tokens) - 1, self._follow(places, token), -negative)
        return TokenTree(tokens=tuple(tokens), parents=tuple(parents), sources=tuple(sources), scores=tuple(scores))

    def _ask(self, places: Places) -> tuple[list[Candidate], list[str]]:
        """All candidates, and the source that each counts as: the first that named it, or the latest of several models."""
        found: dict[int, tuple[str, ...]] = {}
        namers: dict[int, str] = {}
        for name, place in places:
            source = self._sources.get(name)
            if source is None:
                continue
            try:
                for token, kind in source.candidates(place):
                    if token in found:
                        found[token] = (*found[token], kind)
                        if name == self._latest and namers[token] in self._models:
                            namers[token] = name
                    else:
                        namers[token] = name
                        found[token] = (kind,)
            except Exception:
                self._lose(name)
        return list(found.items()), list(namers.values())

    def _follow(self, places: Places, token: int) -> Places:
        followed = []
        for name, place in places:
            source = self._sources.get(name)
            try:
                further = None if source is None else source.follow(place, token)
            except Exception:
                self._lose(name)
                continue
            if further is not None:
                followed.append((name, further))
        return tuple(followed)

    def _lose(self, name: str) -> None:
        """Drop a source that has failed, for the rest of the request: it costs its own nodes only."""
        log.exception("%s drafts nothing more for a request", name)
        del self._sources[name]
