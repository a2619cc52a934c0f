"""Trees of blocks whose rows know the token before: a node's children are what its level says behind that very node.

The block's rows are computed once, as for any block. Each round of the tree then reads the head that knows the token before,
for the nodes that can still matter. A confidence head makes the probabilities of a row smaller where it is unsure; drafts
that are drawn from q keep q as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.drafter.heads.beam import BestFirst, Growth, SampledChain, TreeGrowth
from services.drafter.heads.blocks.drafter import BlockDrafter
from services.drafter.heads.choosing_session import ChoosingSession
from services.drafter.heads.draft_choice import AskedRows, DraftChoice
from services.drafter.heads.levels import LevelForm
from services.drafter.heads.outcome_trees import OutcomeTrees
from services.drafter.sessions.drawn_proposals import Draw, draw_with
from services.drafter.sources.interfaces import Ahead, AheadWanted, DraftWanted
from speculation.tree import ROOT
from speculation.types import TokenTree

# Rounds for each level of a tree: beyond the likeliest path, they go to other nodes of all depths.
_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class _Level:
    """One session's part of a round.

    Attributes:
        place: its place in the batch.
        nodes: those whose children are wanted.
    """

    place: int
    session: ChoosingSession
    growth: Growth
    nodes: NDArray[np.int64]

    @property
    def previous(self) -> NDArray[np.int64]:
        """[nodes], the token of each; at the root, the last committed one."""
        at_root = self.nodes == ROOT
        return np.full(len(self.nodes), self.session.tokens[-1]) if at_root.any() else self.growth.tokens(self.nodes)


class _States:
    """What a drafter knows of the paths to nodes whose children it has given."""

    def __init__(self, size: int, like: torch.Tensor) -> None:
        # The first row stands before the last committed token.
        self._rows = torch.zeros(1, size, dtype=like.dtype, device=like.device)
        self._at: dict[tuple[int, int], int] = {}

    def before(self, level: Sequence[_Level]) -> torch.Tensor:
        """[nodes, size], those of the nodes' parents."""
        found = []
        for each in level:
            at_root = each.nodes == ROOT
            parents = [None] if at_root.any() else each.growth.parents(each.nodes).tolist()
            found += [0 if parent is None else self._at[each.place, parent] for parent in parents]
        return self._rows[found]

    def keep(self, level: Sequence[_Level], after: torch.Tensor) -> None:
        """Keep [nodes, size], those of the nodes."""
        nodes = ((each.place, node) for each in level for node in each.nodes.tolist())
        self._at.update({node: row for row, node in enumerate(nodes, len(self._rows))})
        self._rows = torch.cat((self._rows, after))


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of one batch, as their trees read them.

    Attributes:
        rows: [sessions, levels, h].
        logits: [sessions, levels, V_d], before the token before is known.
        states: of the paths to nodes.
    """

    rows: torch.Tensor
    logits: torch.Tensor
    states: _States


@dataclass(frozen=True, slots=True)
class _LastDraft:
    """A session's last draft, and which of ``blocks`` it has grown from."""

    growth: TreeGrowth
    place: int
    blocks: _Blocks


class SequentialTrees:
    """Makes trees as ``LevelTrees`` does, for a drafter whose rows know the token before.

    Args:
        name: of the source.
        draw: draws chains under ``acceptance: rejection``.
        ahead: whether drafts may be made ahead, for which sessions keep the blocks of their last draft.
    """

    def __init__(
        self, name: str, drafter: BlockDrafter, form: LevelForm, draw: Draw | None = None, *, ahead: bool = False
    ) -> None:
        levels = drafter.config.levels
        self._name = name
        self._ahead = ahead
        self._drafter = drafter
        self._choice = DraftChoice(drafter)
        self._levels = levels
        self._depth = min(levels, form.depth or levels)
        self._width = form.width
        self._draw = draw or draw_with()

    def grow(self, wanted: Sequence[DraftWanted], hidden: torch.Tensor) -> list[TokenTree]:
        """As ``LevelTrees.grow``."""
        ahead = np.arange(self._levels)
        asked = [AskedRows(each.session, len(each.session.tokens) + ahead) for each in wanted]
        logits = self._choice.logits(hidden, asked).view(len(wanted), self._levels, -1)
        rows = hidden.view(len(wanted), self._levels, -1)
        growths = [self._growth(each) for each in wanted]
        level = [
            _Level(place, each.session, growth, np.array([ROOT]))
            for place, (each, growth) in enumerate(zip(wanted, growths, strict=True))
        ]
        blocks = _Blocks(rows, logits, _States(self._drafter.state_size, hidden))
        while level:
            self._extend(level, blocks)
            level = _grown(level)
        if self._ahead:
            for place, (each, growth) in enumerate(zip(wanted, growths, strict=True)):
                if not each.session.sampled:
                    each.session.drafted = _LastDraft(growth, place, blocks)
        return [growth.tree(self._name) for growth in growths]

    def ahead(self, batch: Sequence[AheadWanted], go_on: Callable[[], bool]) -> list[list[Ahead]]:
        """As ``LevelTrees.ahead``; each level that an outcome left knows the token before it, too."""
        growths: dict[int, OutcomeTrees] = {}
        # Sessions need not have drafted together.
        levels: dict[int, tuple[_Blocks, list[_Level]]] = {}
        for number, wanted in enumerate(batch):
            last: _LastDraft | None = wanted.session.drafted
            if last is None:
                continue
            wanted.session.drafted = None
            steps = _ROUNDS * self._depth
            growths[number] = growth = OutcomeTrees.behind(last.growth, wanted, steps=steps, width=self._width)
            _, level = levels.setdefault(id(last.blocks), (last.blocks, []))
            level.append(_Level(last.place, wanted.session, growth, growth.grow()))
        for blocks, level in levels.values():
            level = [each for each in level if len(each.nodes)]
            while level and go_on():
                self._extend(level, blocks)
                level = _grown(level)
        return [growths[number].found(self._name) if number in growths else [] for number in range(len(batch))]

    def _extend(self, level: Sequence[_Level], blocks: _Blocks) -> None:
        """Give all nodes of a round their children."""
        rows, logits, states = blocks.rows, blocks.logits, blocks.states
        depths = np.concatenate([each.growth.depths(each.nodes) for each in level])
        places = np.repeat([each.place for each in level], [len(each.nodes) for each in level])
        # Behind the last level comes nothing, whatever is computed for it.
        at = torch.from_numpy(places), torch.from_numpy(np.minimum(depths, self._levels - 1))
        own = rows[at]
        previous = torch.from_numpy(np.concatenate([each.previous for each in level])).to(own.device)
        levels = torch.from_numpy(depths).to(own.device)
        said, after = self._drafter.corrected(logits[at], own, previous, levels, states.before(level))
        states.keep(level, after)
        asked = [AskedRows(each.session, len(each.session.tokens) + each.growth.depths(each.nodes)) for each in level]
        tokens, logs = self._choice.of(said, asked, max(each.growth.children for each in level))
        logs[depths >= self._depth] = -np.inf
        sure = self._drafter.confidence(own, previous)
        doubts = np.zeros(len(depths)) if sure is None else sure.double().log().cpu().numpy()
        begin = 0
        for each in level:
            end = begin + len(each.nodes)
            doubt = 0.0 if each.session.sampled else doubts[begin:end, None]
            each.growth.add(tokens[begin:end], logs[begin:end] + doubt)
            begin = end

    def _growth(self, wanted: DraftWanted) -> TreeGrowth:
        if wanted.session.sampled:
            return SampledChain(wanted.max_nodes, steps=self._depth - 1, draw=self._draw)
        steps = _ROUNDS * self._depth
        return BestFirst(wanted.max_nodes, steps=steps, width=self._width, least=wanted.min_probability)


def _grown(level: Sequence[_Level]) -> list[_Level]:
    """The next round of the same trees, as far as they grow on."""
    return [_Level(each.place, each.session, each.growth, nodes) for each in level if len(nodes := each.growth.grow())]
