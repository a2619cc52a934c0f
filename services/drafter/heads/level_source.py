"""What sources have in common whose models guess all levels of a tree in one pass, behind committed rows that they keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from services.drafter.heads.cache import CacheShape
from services.drafter.heads.draft_vocabulary import DraftVocabulary
from services.drafter.heads.session import Due, FeatureSession, due_in
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
    """Implements ``ModelSource`` and ``DraftsAhead``.

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
        self._model, self._trees = model, trees
        self._layers, self._missing = layers, missing
        self._shape = shape
        self._room = CacheRoom(most_bytes)

    @abstractmethod
    def _guess(self, due: Sequence[Due]) -> tuple[list[Due], torch.Tensor]:
        """Compute committed rows, and the levels behind those of each draft that can begin.

        Returns:
            These drafts, and [drafts * levels, h], what the output layer reads of their levels. The others have too many
            rows for one call, and must be asked for again.
        """

    def open(self, message: OpenSession) -> FeatureSession:
        """As ``ModelSource.open``."""
        return FeatureSession(message, self._shape, self._model.beyond(message.tokens[: message.prompt_length]))

    @torch.inference_mode()
    def draft(self, batch: Sequence[DraftWanted]) -> list[TokenTree | None]:
        """As ``ModelSource.draft``."""
        trees: list[TokenTree | None] = [None if wanted.max_nodes else EMPTY_TREE for wanted in batch]
        due = due_in(batch, self._layers, self._missing)
        if not due:
            return trees
        ready, hidden = self._guess(due)
        if ready:
            drafted = self._trees.grow([batch[each.place] for each in ready], hidden)
            for each, tree in zip(ready, drafted, strict=True):
                trees[each.place] = tree
        self._room.used(each.session.cache for each in due)
        return trees

    @torch.inference_mode()
    def draft_ahead(self, batch: Sequence[AheadWanted], go_on: Callable[[], bool]) -> list[list[Ahead]]:
        """As ``DraftsAhead.draft_ahead``. Drafts that are drawn from q are not made ahead."""
        return self._trees.ahead(batch, go_on)

    def forget(self, tenant: str) -> None:
        """Nothing is kept beyond a session."""
        return
