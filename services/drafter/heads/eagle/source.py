"""A head of hidden states as a source of drafts: EAGLE, EAGLE-2, EAGLE-3, HASS, FSPAD, and MTP layers.

A draft is one pass over the newly committed tokens with the target's own states, whose last row gives the root's children;
then one pass for each further level, with the states that the head feeds back to itself. Each pass is over all sessions of
the batch. (Li et al., EAGLE, 2401.15077, section 4; EAGLE-2, 2406.16858, section 4.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from services.drafter.config import DrafterConfig, TrainedConfig
from services.drafter.heads.beam import BestFirst, DynamicTree, SampledChain, TreeGrowth
from services.drafter.heads.cache import PassRows
from services.drafter.heads.canary.heads import check_checkpoint
from services.drafter.heads.draft_choice import DraftChoice
from services.drafter.heads.files.head_files import load_head
from services.drafter.heads.growing_draft import GrowingDraft, LastDraft
from services.drafter.heads.level_graphs import LevelGraphs, LevelOutput, LevelPasses, LevelSizes
from services.drafter.heads.outcome_trees import OutcomeTrees
from services.drafter.heads.pass_attention import PassAttention
from services.drafter.heads.products import multiply_by_kernels
from services.drafter.heads.session import FeatureSession, due_in, in_one_call
from services.drafter.heads.state_head import HeadOutput, StateHead
from services.drafter.sessions.cache_room import MOST_BYTES, CacheRoom
from services.drafter.sessions.drawn_proposals import Draw, draw_with
from services.drafter.sessions.thread import use_threads
from services.drafter.sources.interfaces import Ahead, AheadWanted, DraftWanted
from speculation.errors import ConfigurationError
from speculation.messages import OpenSession
from speculation.tree import ROOT
from speculation.types import EMPTY_TREE, TokenTree


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeForm:
    """The form of the trees.

    Attributes:
        steps: most passes after the first.
        width: most nodes of a session in one pass, and most children of a node.
        dynamic: None: the likeliest paths (``BestFirst``). Otherwise EAGLE-2's tree (``DynamicTree``) of this ``total``,
            with ``steps`` as its depth and ``width`` as its top k.
    """

    steps: int = 5
    width: int = 8
    dynamic: int | None = None

    @classmethod
    def of(cls, config: TrainedConfig) -> TreeForm:
        """As the settings say."""
        usual = cls()
        return cls(
            # The first pass gives the first level.
            steps=usual.steps if config.num_steps is None else config.num_steps - 1,
            width=config.eagle_topk or usual.width,
            dynamic=config.num_draft_tokens,
        )

    @property
    def sizes(self) -> LevelSizes:
        """Of the trees' levels."""
        return LevelSizes(width=self.width, rows=self.steps * self.width)

    def within(self, levels: int | None) -> TreeForm:
        """The same of a model that guesses ``levels`` tokens at most; None: any number."""
        return self if levels is None else replace(self, steps=min(self.steps, levels - 1))


def make_eagle(config: DrafterConfig) -> FeatureSource:
    """For ``catalogue.MAKERS``.

    Raises:
        ConfigurationError: no checkpoint is configured, or it cannot draft for the target; says why.
    """
    return _made("eagle", config)


def make_eagle3(config: DrafterConfig) -> FeatureSource:
    """As ``make_eagle``."""
    return _made("eagle3", config)


def make_fspad(config: DrafterConfig) -> FeatureSource:
    """As ``make_eagle``."""
    return _made("fspad", config)


def _made(name: str, config: DrafterConfig) -> FeatureSource:
    trained = config.trained
    folder, target = trained.weights_of(name)
    use_threads()
    head = load_head(folder, target, device=trained.device, dtype=getattr(torch, trained.held_dtype))
    if head.config.family != name:
        raise ConfigurationError(
            f"cannot load the head at {folder} as {name}: its tensors are those of {head.config.family}", about=folder
        )
    multiply_by_kernels(head, trained)
    check_checkpoint(head, folder, target, asked_for=trained.asked_for)
    return FeatureSource(
        name,
        head,
        window=trained.window,
        form=TreeForm.of(trained),
        ahead=config.draft_ahead > 0,
        graphs=partial(LevelGraphs, required=trained.captures),
    )


# Drafts under way, and the nodes of each that run next.
_Level = Sequence[tuple[GrowingDraft, NDArray[np.int64]]]
# A pass over a level: tokens, what the nodes' parents fed back, and positions.
_RunLevel = Callable[[_Level, NDArray[np.int64], torch.Tensor, NDArray[np.int64]], LevelOutput]


class FeatureSource:
    """Implements ``ModelSource`` and ``DraftsAhead``.

    Args:
        name: of the source.
        window: most committed rows that a row attends to; no more than the head's own context, for which it was trained.
        form: of the trees.
        draw: draws chains under ``acceptance: rejection``.
        most_bytes: of all sessions' caches.
        ahead: whether drafts may be made ahead, for which sessions keep what their last draft was made of.
        graphs: captures passes over levels, see ``LevelGraphs``: on a GPU alone, and where that fails they are launched.

    Raises:
        ConfigurationError: they cannot be captured, and must be; or there is not enough memory for them.
    """

    def __init__(
        self,
        name: str,
        head: StateHead,
        *,
        window: int,
        form: TreeForm | None = None,
        draw: Draw | None = None,
        most_bytes: int = MOST_BYTES,
        ahead: bool = False,
        graphs: Callable[..., LevelGraphs] = LevelGraphs,
    ) -> None:
        self._name = name
        # Behind the last level there is nothing to go on with.
        self._ahead = ahead and head.levels is None
        self._head = head
        self._form = (form or TreeForm()).within(head.levels)
        self._choice = DraftChoice(head)
        self._draw = draw or draw_with()
        self._room = CacheRoom(most_bytes)
        self._missing = head.missing_state.detach()
        self._shape = head.cache_shape(window)
        self._graphs = graphs(name, head, self._shape, self._form.sizes)
        self._graphs.capture()

    def open(self, message: OpenSession) -> FeatureSession:
        extra = self._head.beyond(message.tokens[: message.prompt_length])
        return FeatureSession(message, self._shape, extra)

    @torch.inference_mode()
    def draft(self, batch: Sequence[DraftWanted]) -> list[TokenTree | None]:
        trees: list[TokenTree | None] = [None if wanted.max_nodes else EMPTY_TREE for wanted in batch]
        due = [
            GrowingDraft(each.place, each.session, self._growth(batch[each.place]), each.rows)
            for each in due_in(batch, self._head.state_layers, self._missing)
        ]
        if not due:
            return trees
        ready, ends = self._commit(due)
        fed = self._grow(ready, ends) if ready else ends.state
        for each in ready:
            trees[each.place] = each.draft.tree(self._name)
            if self._ahead and not each.session.sampled:
                each.session.drafted = LastDraft(growing=each, fed=each.take_fed(fed), end=each.session.cache.end)
        self._room.used(each.session.cache for each in due)
        return trees

    @torch.inference_mode()
    def draft_ahead(self, batch: Sequence[AheadWanted], go_on: Callable[[], bool]) -> list[list[Ahead]]:
        """As ``DraftsAhead.draft_ahead``: behind what the head itself feeds back, since the target's states have not come.

        Drafts that are drawn from q are not made ahead.
        """
        found: list[list[Ahead]] = [[] for _ in batch]
        growths: list[tuple[int, OutcomeTrees]] = []
        going: list[GrowingDraft] = []
        fed: list[torch.Tensor] = []
        for place, wanted in enumerate(batch):
            last: LastDraft | None = wanted.session.drafted
            # A cache that had to make room holds its rows no more.
            if last is None or last.end != wanted.session.cache.end:
                continue
            wanted.session.drafted = None
            each = last.growing
            growth = OutcomeTrees.behind(each.draft, wanted, steps=self._form.steps, width=self._form.width)
            each.go_on(growth)
            each.move_fed(sum(map(len, fed)))
            fed.append(last.fed)
            each.session.cache.reserve(last.end, growth.rows + len(each.run))
            growths.append((place, growth))
            going.append(each)
        if going:
            level = [(each, nodes) for each in going if len(nodes := each.growth.grow())]
            self._levels(level, torch.cat(fed), self._launched, go_on)
        for place, growth in growths:
            found[place] = growth.found(self._name)
        return found

    def forget(self, tenant: str) -> None:
        """Nothing is kept beyond a session."""

    def _growth(self, wanted: DraftWanted) -> TreeGrowth:
        form, nodes, least = self._form, wanted.max_nodes, wanted.min_probability
        if wanted.session.sampled:
            return SampledChain(nodes, steps=form.steps, draw=self._draw)
        if form.dynamic is not None:
            return DynamicTree(total=min(form.dynamic, nodes + 1), depth=form.steps, top_k=form.width)
        return BestFirst(nodes, steps=form.steps, width=form.width, least=least)

    def _commit(self, due: Sequence[GrowingDraft]) -> tuple[list[GrowingDraft], HeadOutput]:
        """Compute the rows of committed positions.

        Returns:
            The drafts that can begin, and [drafts, h], the output of each one's last row. The others have too many rows for
            one call, and must be asked for again.
        """
        pieces = in_one_call(due)
        for each, piece in pieces:
            each.session.cache.reserve(int(piece.positions[-1]) + 1, each.growth.rows)
        output = self._pass(
            np.concatenate([piece.tokens for _, piece in pieces]),
            self._head.fuse(torch.cat([piece.states for _, piece in pieces])),
            np.concatenate([piece.positions for _, piece in pieces]),
            [each.session.cache.committed(piece.positions) for each, piece in pieces],
        )
        ready, last, end = [], [], 0
        for each, piece in pieces:
            each.session.computed(piece)
            end += len(piece)
            if len(piece) == len(each.rows):
                ready.append(each)
                last.append(end - 1)
        return ready, HeadOutput(hidden=output.hidden[last], state=output.state[last])

    def _grow(self, growing: Sequence[GrowingDraft], ends: HeadOutput) -> torch.Tensor:
        """Grow all trees, level by level, from the output of each session's last committed row.

        Returns:
            [rows, h], what all nodes fed back.
        """
        root = np.array([ROOT])
        for at, each in enumerate(growing):
            each.feed(root, at)
        level = self._add(LevelOutput(hidden=ends.hidden, state=ends.state), [(each, root) for each in growing])
        lanes = {each: lane for lane, each in enumerate(growing)}
        passes = self._graphs.begin([each.session.cache for each in lanes], max(each.growth.rows for each in lanes))
        if passes is None:
            return self._levels(level, ends.state, self._launched)
        fed = self._levels(level, ends.state, partial(self._replayed, passes, lanes))
        if self._ahead:
            for each, lane in lanes.items():
                passes.give_back(lane, each.session.cache, len(each.run))
        return fed

    def _levels(
        self, level: _Level, fed: torch.Tensor, run: _RunLevel, go_on: Callable[[], bool] = lambda: True
    ) -> torch.Tensor:
        """Run ``level`` and what grows from it; [rows, h], what has been fed back before and by it."""
        while level and go_on():
            states = fed[[row for each, nodes in level for row in each.read(nodes)]]
            tokens = np.concatenate([each.growth.tokens(nodes) for each, nodes in level])
            # A node's row is where its parent is; the token after it is its own.
            positions = np.concatenate([each.after(nodes).positions - 2 for each, nodes in level])
            output = run(level, tokens, states, positions)
            first = len(fed)
            for each, nodes in level:
                each.feed(nodes, first)
                first += len(nodes)
            fed = torch.cat((fed, output.state))
            level = self._add(output, level)
        return fed

    def _add(self, output: LevelOutput, level: _Level) -> _Level:
        """Let trees have what follows the nodes of a level, of which the head gave ``output``; the next level."""
        count = max(each.growth.children for each, _ in level)
        asked = [each.after(nodes) for each, nodes in level]
        tokens, logs = self._choice.likeliest(output.hidden, asked, count, output.logits)
        begin = 0
        for each, nodes in level:
            each.growth.add(tokens[begin : begin + len(nodes)], logs[begin : begin + len(nodes)])
            begin += len(nodes)
        return [(each, nodes) for each, _ in level if len(nodes := each.growth.grow())]

    def _launched(
        self, level: _Level, tokens: NDArray[np.int64], states: torch.Tensor, positions: NDArray[np.int64]
    ) -> LevelOutput:
        """One pass over the nodes of all sessions, whose parents fed ``states`` back."""
        made = self._pass(tokens, states, positions, [each.part(nodes) for each, nodes in level])
        return LevelOutput(hidden=made.hidden, state=made.state)

    def _replayed(
        self, passes: LevelPasses, lanes: Mapping[GrowingDraft, int], level: _Level, tokens: NDArray[np.int64],
        states: torch.Tensor, positions: NDArray[np.int64],
    ) -> LevelOutput:  # fmt: skip
        """The same, captured."""
        return passes.run(tokens, states, positions, {lanes[each]: each.enter(nodes) for each, nodes in level})

    def _pass(
        self, tokens: NDArray[np.int64], states: torch.Tensor, positions: NDArray[np.int64], parts: Sequence[PassRows]
    ) -> HeadOutput:
        """One pass over rows of many sessions, [rows, h]. Each row: its position's state, and the token after it."""
        device = self._shape.device
        embeddings = self._head.embed(torch.from_numpy(tokens).to(device))
        places = torch.from_numpy(positions).to(device)
        output = self._head(embeddings[None], states[None], places[None], PassAttention(parts))
        return HeadOutput(hidden=output.hidden[0], state=output.state[0])
