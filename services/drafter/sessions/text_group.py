"""Joins a request's text sources into one session. Everything here runs in the text sources' thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from services.drafter.config import DrafterConfig
from services.drafter.merging.blend import BlendSession
from services.drafter.merging.calibrator import Calibrator
from services.drafter.merging.calibrators import BlendedRequests, Calibrators
from services.drafter.native.blend import CompiledBlendSession
from services.drafter.native.calibrator import CompiledCalibrator
from services.drafter.native.library import drafting_library
from services.drafter.sessions.outcomes import likeliest_outcomes
from services.drafter.sessions.tree_walk import ProposedTreeWalk, TreeWalk, prior_of
from services.drafter.sources.catalogue import make_source
from services.drafter.sources.interfaces import LookingUp, PathSession, SourceSession, TextSource, TreeSession
from services.drafter.sources.suffix import NAME as SUFFIX
from services.drafter.sources.suffix import Suffix
from speculation import limits
from speculation.messages import Continuation, OpenSession, RetrievalQuery, StepReport
from speculation.sources import SOURCES, runs_model
from speculation.types import EMPTY_TREE, TokenTree

# Most nodes that a source of trees proposes to the blend, which takes the best of them.
_PROPOSED = 32


@dataclass(kw_only=True, slots=True)
class TextSession:
    """A request's text sources.

    Attributes:
        joined: all sources as one.
        looking_up: sources that query the retrieval index.
        tree: the last draft.
    """

    joined: TreeSession
    looking_up: Sequence[LookingUp]
    tree: TokenTree = EMPTY_TREE

    def observe(self, report: StepReport) -> None:
        """As ``SourceSession.observe``."""
        self.joined.observe(report)

    def queries(self) -> list[RetrievalQuery | None]:
        """The query before the next draft of each source in ``looking_up``; None: no query."""
        return [source.query() for source in self.looking_up]

    def draft(self, max_nodes: int, found: Sequence[Sequence[Continuation] | None] = ()) -> TokenTree:
        """A tree of what may follow everything seen so far.

        Args:
            found: what the index has found for each of ``queries``; None if there was no query.
        """
        for source, hits in zip(self.looking_up, found, strict=True):
            if hits is not None:
                source.found(hits)
        self.tree = self.joined.draft(max_nodes)
        return self.tree

    def join(self, name: str, tree: TokenTree, max_nodes: int) -> TokenTree:
        """A draft for the same prefix in which a model's tree takes part."""
        blend = cast(BlendSession, self.joined)
        blend.take(name, tree)
        self.tree = blend.draft(max_nodes)
        return self.tree

    def outcomes(self, most: int) -> list[tuple[int, ...]]:
        """The likeliest outcomes of the step that the last draft was for; none unless the sources are blended."""
        if not isinstance(self.joined, BlendSession):
            return []
        outcomes = likeliest_outcomes(self.tree, self.joined.likeliest_after, most)
        return [outcome for outcome in outcomes if len(outcome) <= limits.MAX_ASSUMED]

    def draft_after(self, outcome: Sequence[int], max_nodes: int) -> TokenTree:
        """A tree of what may follow one of ``outcomes``."""
        return cast(BlendSession, self.joined).draft_after(outcome, max_nodes)

    def catch_up(self) -> bool:
        """As ``PathSession.catch_up``."""
        return isinstance(self.joined, BlendSession) and self.joined.catch_up()

    def close(self) -> None:
        """As ``SourceSession.close``."""
        self.joined.close()


class TextGroup:
    """Makes sessions; each source is made once, when it is first named."""

    def __init__(self, config: DrafterConfig) -> None:
        self._config = config
        self._sources: dict[str, TextSource] = {}
        self._calibrators = Calibrators(config, self._prior_of)

    def open(self, message: OpenSession, names: tuple[str, ...]) -> TextSession:
        """A session with the text sources ``names``, which exist.

        A single source that proposes trees drafts alone, as in its paper, unless the request has models too. Everything else
        is blended, with the request's models.

        Raises:
            ConfigurationError: a file that a source needs cannot be read.
        """
        opened = {name: self._source(name).open(message) for name in names}
        looking_up = [cast(LookingUp, session) for name, session in opened.items() if SOURCES[name].retrieval]
        # Sorted, since those that draft together share a calibrator, whichever is the cheaper one.
        models = tuple(sorted(name for name in message.sources if runs_model(name)))
        if len(names) == 1 and not models and self._proposes_trees(names[0]):
            return TextSession(joined=cast(TreeSession, opened[names[0]]), looking_up=looking_up)
        blended = BlendedRequests(names=names, sampled=message.temperature > 0, adapter=message.adapter)
        joined = self._blend(
            {name: self._path(name, session) for name, session in opened.items()},
            self._calibrators.of(blended),
            {name: TreeWalk(name) for name in models},
            lambda present: self._calibrators.of(replace(blended, names=(*names, *present))),
        )
        return TextSession(joined=joined, looking_up=looking_up)

    def take_answers(self, tenant: str, answers: Sequence[Sequence[int]]) -> None:
        """Let suffix decoding know answers that other drafters have given to a tenant."""
        cast(Suffix, self._source(SUFFIX)).remember(tenant, answers)

    def forget(self, tenant: str) -> None:
        """Delete what the sources keep of a tenant's requests."""
        for source in self._sources.values():
            source.forget(tenant)

    def save(self) -> None:
        """Save what was learnt about the sources, if a file is configured."""
        self._calibrators.save()

    def _source(self, name: str) -> TextSource:
        if name not in self._sources:
            self._sources[name] = cast(TextSource, make_source(name, self._config))
        return self._sources[name]

    def _prior_of(self, name: str) -> Mapping[str, float]:
        return prior_of(name) if runs_model(name) else self._source(name).prior or prior_of(name)

    def _proposes_trees(self, name: str) -> bool:
        return self._source(name).prior is None

    def _path(self, name: str, session: SourceSession) -> PathSession:
        if self._proposes_trees(name):
            return ProposedTreeWalk(name, cast(TreeSession, session), _PROPOSED)
        return cast(PathSession, session)

    def _blend(
        self,
        paths: Mapping[str, PathSession],
        alone: Calibrator,
        walks: Mapping[str, TreeWalk],
        joint: Callable[[tuple[str, ...]], Calibrator],
    ) -> BlendSession:
        library = drafting_library()
        if library is None or not isinstance(alone, CompiledCalibrator):
            return BlendSession(paths, alone, walks, joint)
        return CompiledBlendSession(library, paths, alone, walks, joint)
