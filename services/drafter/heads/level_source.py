"""What sources have in common whose models guess all levels of a tree at once; most of them behind committed rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from typing_extensions import override

from services.drafter.heads.cache import CacheShape, PassRows
from services.drafter.heads.draft_vocabulary import DraftVocabulary
from services.drafter.heads.session import CommittedRows, Due, FeatureSession, due_in
from services.drafter.sessions.cache_room import CacheRoom
from services.drafter.sources.interfaces import Ahead, AheadWanted, DraftWanted
from speculation.messages import OpenSession
from speculation.types import EMPTY_TREE, TokenTree


class Beyond(Protocol):
    """A model whose vocabulary may be widened for a prompt."""

    def beyond(self, tokens: Iterable[int]) -> DraftVocabulary | None:
        """Those of ``tokens`` that it does not draft for every request; None: there are none."""
        ...


class Trees(Protocol):
    """Grows trees of levels, see ``LevelTrees``."""

    def grow(self, wanted: Sequence[DraftWanted], hidden: torch.Tensor) -> list[TokenTree]:
        """As ``LevelTrees.grow``."""
        ...

    def ahead(self, batch: Sequence[AheadWanted], go_on: Callable[[], bool]) -> list[list[Ahead]]:
        """As ``LevelTrees.ahead``."""
        ...


class LevelSource(ABC):
    """Implements ``ModelSource`` and ``DraftsAhead``, but for ``ModelSource.open``."""

    def __init__(self, trees: Trees) -> None:
        self._trees = trees

    @abstractmethod
    def _guess(self, batch: Sequence[DraftWanted]) -> dict[int, torch.Tensor]:
        """What the output layer reads of the levels of each draft that can begin, [levels, h], by its place in the batch.

        Where a draft has no nodes, none is wanted. The others must be asked for again.
        """

    @torch.inference_mode()
    def draft(self, batch: Sequence[DraftWanted]) -> list[TokenTree | None]:
        """As ``ModelSource.draft``."""
        trees: list[TokenTree | None] = [None if wanted.max_nodes else EMPTY_TREE for wanted in batch]
        if hidden := self._guess(batch):
            drafted = self._trees.grow([batch[place] for place in hidden], torch.cat(list(hidden.values())))
            for place, tree in zip(hidden, drafted, strict=True):
                trees[place] = tree
        return trees

    @torch.inference_mode()
    def draft_ahead(self, batch: Sequence[AheadWanted], go_on: Callable[[], bool]) -> list[list[Ahead]]:
        """As ``DraftsAhead.draft_ahead``. Drafts that are drawn from q are not made ahead."""
        return self._trees.ahead(batch, go_on)

    def forget(self, tenant: str) -> None:
        """Nothing is kept beyond a session."""
        return


class CommittedLevelSource(LevelSource):
    """A source whose levels stand behind committed rows, which sessions keep.

    Args:
        model: what guesses.
        layers: of the target, whose states it reads.
        missing: what takes the place of a state that is not known.
        shape: of a session's cache.
        most_bytes: of all sessions' caches.
    """

    def __init__(
        self,
        model: Beyond,
        trees: Trees,
        *,
        layers: tuple[int, ...],
        missing: torch.Tensor,
        shape: CacheShape,
        most_bytes: int,
    ) -> None:
        super().__init__(trees)
        self._model = model
        self._layers, self._missing = layers, missing
        self._shape = shape
        self._room = CacheRoom(most_bytes)

    @abstractmethod
    def _compute(self, due: Sequence[Due]) -> dict[int, torch.Tensor]:
        """Compute committed rows, and the levels behind those of each draft that can begin: as ``_guess``.

        The others have too many rows for one call.
        """

    def open(self, message: OpenSession) -> FeatureSession:
        """As ``ModelSource.open``."""
        return FeatureSession(message, self._shape, self._model.beyond(message.tokens[: message.prompt_length]))

    @override
    def _guess(self, batch: Sequence[DraftWanted]) -> dict[int, torch.Tensor]:
        return self._guess_for(due_in(batch, self._layers, self._missing))

    @contextmanager
    def _computing(self, pieces: Sequence[tuple[Due, CommittedRows]], behind: int) -> Iterator[list[PassRows]]:
        """The parts of a pass over committed rows, with room for as many rows behind those of each session.

        Within the block they count as computed, since what stands behind them is laid out by that. If it fails they do not.
        """
        try:
            parts = []
            for each, piece in pieces:
                cache = each.session.cache
                cache.reserve(int(piece.positions[-1]) + 1, behind)
                parts.append(cache.committed(piece.positions))
                each.session.computed(piece)
            yield parts
        except BaseException:
            for each, _ in pieces:
                each.session.cache.clear()
            raise

    def _guess_for(self, due: Sequence[Due]) -> dict[int, torch.Tensor]:
        found = self._compute(due) if due else {}
        self._room.used(each.session.cache for each in due)
        return found
