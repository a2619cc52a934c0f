"""Which sources a request drafts with, joined into one session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.drafter.blend import BlendSession
from services.drafter.calibrator import Calibrator
from services.drafter.catalogue import SOURCES, WALKED
from services.drafter.config import DrafterConfig
from services.drafter.source import PathSource, Retrieving, Source, SourceSession, WalkedSource
from services.drafter.tree_walk import TreeWalk, prior_of
from speculation.messages import OpenSession

# Nodes that a source of trees proposes to the blend, which takes the best of them.
_PROPOSED = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """A request's sources.

    Attributes:
        session: all of them, as one.
        retrieving: those that want to be given what the index finds.
        blend: the session, where it can draft ahead.
    """

    session: SourceSession
    retrieving: Sequence[Retrieving]
    blend: BlendSession | None


class Sources:
    """Makes sessions; every source is built once, when it is first asked for."""

    def __init__(self, config: DrafterConfig) -> None:
        self._config = config
        self._trees: dict[str, Source] = {}
        self._walked: dict[str, WalkedSource] = {}
        self._calibrators: dict[tuple[str, ...], Calibrator] = {}

    def open(self, message: OpenSession) -> Joined:
        """A session with the sources that ``message`` names, which exist.

        One source that proposes trees is left alone: that is the papers' form. All else is blended.

        Raises:
            ConfigurationError: a file that a source needs cannot be read.
        """
        names = message.sources
        if len(names) == 1 and names[0] in SOURCES:
            session = self._tree_source(names[0]).open(message)
            return Joined(session=session, retrieving=_retrieving([session]), blend=None)
        paths: dict[str, PathSource] = {}
        opened: list[object] = []
        for name in names:
            if name in WALKED:
                paths[name] = self._walked_source(name).open(message)
            else:
                tree_session = self._tree_source(name).open(message)
                paths[name] = TreeWalk(name, tree_session, _PROPOSED)
                opened.append(tree_session)
        blend = BlendSession(paths, self._calibrator(names))
        return Joined(session=blend, retrieving=_retrieving(opened), blend=blend)

    def forget(self, tenant: str) -> None:
        """Delete what sources remember of a tenant's requests; those that propose trees remember nothing beyond one."""
        for source in self._walked.values():
            source.forget(tenant)

    def save(self) -> None:
        """Keep what was learnt of the sources, where that is asked for."""
        for names, calibrator in self._calibrators.items():
            if (file := self._file(names)) is not None:
                calibrator.save(file)

    def _tree_source(self, name: str) -> Source:
        if name not in self._trees:
            self._trees[name] = SOURCES[name](self._config)
        return self._trees[name]

    def _walked_source(self, name: str) -> WalkedSource:
        if name not in self._walked:
            self._walked[name] = WALKED[name](self._config)
        return self._walked[name]

    def _calibrator(self, names: tuple[str, ...]) -> Calibrator:
        """Of one combination of sources: beside others, a source is worth something else."""
        found = self._calibrators.get(names)
        if found is None:
            prior: dict[str, float] = {}
            for name in names:
                prior |= self._walked_source(name).prior if name in WALKED else prior_of(name)
            found = self._calibrators[names] = Calibrator(prior)
            if (file := self._file(names)) is not None:
                found.load(file)
        return found

    def _file(self, names: tuple[str, ...]) -> Path | None:
        """Where what is learnt of a combination is kept."""
        kept = self._config.calibration
        return None if kept is None else kept.with_suffix(f".{'-'.join(names)}.json")


def _retrieving(sessions: Sequence[object]) -> list[Retrieving]:
    return [session for session in sessions if isinstance(session, Retrieving)]
