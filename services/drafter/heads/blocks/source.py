"""Block drafters as a source of drafts: one pass a draft, whatever the depth of its tree.

A block's rows are guessed without knowing each other, so that they are the levels of a tree (``LevelTrees``). DSpark's know
the token before (``SequentialTrees``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from typing_extensions import override

from services.drafter.config import DrafterConfig
from services.drafter.heads.blocks.drafter import BlockDrafter
from services.drafter.heads.blocks.files import load_blocks
from services.drafter.heads.blocks.sequential_trees import SequentialTrees
from services.drafter.heads.cache import CacheShape, PassRows
from services.drafter.heads.canary.levels import check_levels_at
from services.drafter.heads.level_source import CommittedLevelSource
from services.drafter.heads.levels import LevelForm, LevelTrees
from services.drafter.heads.pass_attention import PassAttention
from services.drafter.heads.products import multiply_by_kernels
from services.drafter.heads.session import Due, FeatureSession, in_one_call
from services.drafter.sessions.cache_room import MOST_BYTES
from services.drafter.sessions.drawn_proposals import Draw
from services.drafter.sessions.thread import use_threads

NAME = "dflash"


def make(config: DrafterConfig) -> BlockSource:
    """For ``catalogue.MAKERS``.

    Raises:
        ConfigurationError: no checkpoint is configured, or it cannot draft for the target; says why.
    """
    trained = config.trained
    folder, target = trained.weights_of(NAME)
    use_threads()
    drafter = load_blocks(folder, target, device=trained.device, dtype=getattr(torch, trained.held_dtype))
    multiply_by_kernels(drafter, trained)
    check_levels_at(drafter, folder, target, asked_for=trained.asked_for)
    return BlockSource(drafter, window=trained.window, form=LevelForm.of(trained), ahead=config.draft_ahead > 0)


class BlockSource(CommittedLevelSource):
    """Positions without a state are hidden from the block, until their states come.

    Args:
        window: most committed positions that a block attends to; no more than it was trained for.
        form: of the trees.
        draw: draws chains under ``acceptance: rejection``.
        most_bytes: of all sessions' caches.
        ahead: whether drafts may be made ahead, for which sessions keep what their last draft was made of.
    """

    def __init__(
        self,
        drafter: BlockDrafter,
        *,
        window: int,
        form: LevelForm | None = None,
        draw: Draw | None = None,
        most_bytes: int = MOST_BYTES,
        ahead: bool = False,
    ) -> None:
        form, weight = form or LevelForm(), drafter.norm.weight
        if form.depth is not None and (shorter := drafter.config.cut(form.depth)) != drafter.config:
            # Levels that nobody asks for are not computed.
            drafter = drafter.under(shorter)
        self._drafter, config = drafter, drafter.config
        self._kinds = tuple(zip(config.causal, config.windows, strict=True))
        super().__init__(
            drafter,
            SequentialTrees(NAME, drafter, form, draw, ahead=ahead)
            if drafter.sequential
            else LevelTrees(NAME, drafter, config.levels, form, draw, ahead=ahead),
            layers=config.layer.state_layers,
            missing=torch.zeros(config.layer.state_size, dtype=weight.dtype, device=weight.device),
            shape=CacheShape(
                layers=config.layer.num_layers,
                heads=config.layer.num_key_value_heads,
                width=config.layer.head_dim,
                window=min(window, config.layer.max_positions),
                dtype=weight.dtype,
                device=weight.device,
            ),
            most_bytes=most_bytes,
        )

    @override
    def _compute(self, due: Sequence[Due]) -> dict[int, torch.Tensor]:
        ready = self._commit(due)
        hidden = self._blocks([each.session for each in ready]) if ready else ()
        return {each.place: own for each, own in zip(ready, hidden, strict=True)}

    def _commit(self, due: Sequence[Due]) -> list[Due]:
        """Make keys and values of the states of committed positions.

        Returns:
            The drafts that can begin. The others have too many rows for one call, and must be asked for again.
        """
        pieces = in_one_call(due)
        for each, piece in pieces:
            each.session.cache.reserve(int(piece.positions[-1]) + 1, self._drafter.config.block_size)
        parts = [each.session.cache.committed(piece.positions) for each, piece in pieces]
        positions = np.concatenate([piece.positions for _, piece in pieces])
        self._drafter.keep_states(
            torch.cat([piece.states for _, piece in pieces])[None],
            torch.from_numpy(positions).to(self._shape.device)[None],
            lambda keys, values, layer: _keep(parts, keys[0], values[0], layer),
        )
        for each, piece in pieces:
            each.session.computed(piece)
        return [each for each, piece in pieces if len(piece) == len(each.rows)]

    def _blocks(self, sessions: Sequence[FeatureSession]) -> torch.Tensor:
        """[sessions, levels, h], what the output layer reads of their blocks' guesses: one pass for all."""
        size, device = self._drafter.config.block_size, self._shape.device
        by_kind = {
            (causal, window): PassAttention(
                [each.cache.block(size, each.without, causal=causal, window=window) for each in sessions]
            )
            for causal, window in set(self._kinds)
        }
        anchors = torch.tensor([each.tokens[-1] for each in sessions], device=device)
        places = torch.tensor([len(each.tokens) - 1 for each in sessions], device=device)
        hidden = self._drafter(
            self._drafter.block_of(anchors).flatten()[None],
            (places[:, None] + torch.arange(size, device=device)).flatten()[None],
            lambda query, key, value, layer: by_kind[self._kinds[layer]](query, key, value, layer),
        )
        return self._drafter.guesses(hidden[0].view(len(sessions), size, -1))


def _keep(parts: Sequence[PassRows], keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
    """Write a layer's keys and values, those of ``parts`` one after the other."""
    sizes = [part.rows for part in parts]
    for part, key, value in zip(parts, torch.split(keys, sizes, dim=1), torch.split(values, sizes, dim=1), strict=True):
        part.keep(key, value, layer)
