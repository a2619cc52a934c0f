"""Trees of models that guess several tokens ahead at once, each without knowing the ones before it.

Level j (from 1) is a distribution of the j-th token to come. A path's probability is the product over its levels. That is no
joint distribution: the second token is guessed without knowing the first. The target walks the tree, so this costs speed at
most; and the calibrator learns what each depth is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from services.drafter.config import Choices, TrainedConfig
from services.drafter.heads.beam import (
    BestFirst,
    Indices,
    Numbers,
    SampledChain,
    TreeGrowth,
    grow_by_levels,
    grow_on_by_levels,
)
from services.drafter.heads.choosing_session import ChoosingSession
from services.drafter.heads.draft_choice import AskedRows, DraftChoice, StateDrafter
from services.drafter.heads.medusa.fixed_tree import FixedTree
from services.drafter.heads.outcome_trees import OutcomeTrees
from services.drafter.sessions.drawn_proposals import Draw, draw_with
from services.drafter.sources.interfaces import Ahead, AheadWanted, DraftWanted
from speculation.types import TokenTree


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelForm:
    """The form of the trees.

    Attributes:
        depth: most levels that are used; None: all.
        width: most children of a node. Medusa's trees take the ten likeliest tokens of each head.
        fixed: Medusa's fixed tree; None: the likeliest paths.
    """

    depth: int | None = None
    width: int = 10
    fixed: Choices | None = None

    @classmethod
    def of(cls, config: TrainedConfig) -> LevelForm:
        """As the settings say."""
        return cls(depth=config.num_steps, width=config.eagle_topk or cls().width)

    @classmethod
    def of_medusa(cls, config: TrainedConfig) -> LevelForm:
        """As the settings say; ``medusa_choices`` with them."""
        return replace(cls.of(config), fixed=config.medusa_choices)


@dataclass(frozen=True, slots=True)
class _Guessed:
    """A session's last draft, and its levels: [levels + 1, children] tokens and their log-probabilities."""

    growth: TreeGrowth
    tokens: Indices
    logs: Numbers


class LevelTrees:
    """Makes trees of levels.

    Args:
        name: of the source.
        levels: tokens ahead that the model guesses.
        draw: draws chains under ``acceptance: rejection``.
        ahead: whether drafts may be made ahead, for which sessions keep the levels of their last draft.
    """

    def __init__(
        self, name: str, model: StateDrafter, levels: int, form: LevelForm, draw: Draw | None = None, *, ahead: bool = False
    ) -> None:
        self._name = name
        self._ahead = ahead
        self._choice = DraftChoice(model)
        self._levels = levels
        self._depth = min(levels, form.depth or levels)
        self._width = form.width
        self._fixed = form.fixed
        self._draw = draw or draw_with()

    def grow(self, wanted: Sequence[DraftWanted], hidden: torch.Tensor) -> list[TokenTree]:
        """One tree for each of ``wanted``.

        Args:
            hidden: [len(wanted) * levels, h], what the output layer reads of each one's levels in their order.
        """
        levels = self._levels
        growths = [self._growth(each) for each in wanted]
        count = max(growth.children for growth in growths)
        tokens, logs = self._choice.likeliest(hidden, [self._asked(each.session) for each in wanted], count)
        # Nothing comes behind the last level.
        by_session = np.full((len(wanted), levels + 1, logs.shape[1]), -np.inf)
        by_session[:, :levels] = logs.reshape(len(wanted), levels, -1)
        by_session[:, self._depth :] = -np.inf
        guessed = np.zeros(by_session.shape, dtype=np.int64)
        guessed[:, :levels] = tokens.reshape(len(wanted), levels, -1)
        for each, growth, own, chances in zip(wanted, growths, guessed, by_session, strict=True):
            grow_by_levels(growth, own, chances)
            if self._ahead and not each.session.sampled:
                each.session.drafted = _Guessed(growth, own, chances)
        return [growth.tree(self._name) for growth in growths]

    def ahead(self, batch: Sequence[AheadWanted], go_on: Callable[[], bool]) -> list[list[Ahead]]:
        """As ``DraftsAhead.draft_ahead``: behind an outcome stand the levels that it left, for which no pass is needed.

        The first draft that is made after the outcome guesses further and knows it, so it is the better one; this one is
        there at once.
        """
        return [self._behind(wanted) if go_on() else [] for wanted in batch]

    def _behind(self, wanted: AheadWanted) -> list[Ahead]:
        last: _Guessed | None = wanted.session.drafted
        if last is None:
            return []
        wanted.session.drafted = None
        growth = OutcomeTrees.behind(last.growth, wanted, steps=wanted.max_nodes, width=self._width)
        grow_on_by_levels(growth, last.tokens, last.logs)
        return growth.found(self._name)

    def _asked(self, session: ChoosingSession) -> AskedRows:
        return AskedRows(session, len(session.tokens) + np.arange(self._levels))

    def _growth(self, wanted: DraftWanted) -> TreeGrowth:
        if wanted.session.sampled:
            return SampledChain(wanted.max_nodes, steps=self._depth - 1, draw=self._draw)
        if self._fixed is not None:
            return FixedTree(wanted.max_nodes, self._fixed)
        # Deeper nodes cost nothing, so that the tree is the likeliest paths of all.
        return BestFirst(wanted.max_nodes, steps=wanted.max_nodes, width=self._width, least=wanted.min_probability)
