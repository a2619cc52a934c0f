"""P-EAGLE as a source of drafts: EAGLE-3 with masks behind the last row, so that one pass guesses all levels of a tree.

A mask's row is (embedding of the mask token, the trained state in place of a missing one), at the position behind the row
before it; it sees the committed rows and the masks before it. Level 1 is what the last committed row guesses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from typing_extensions import override

from services.drafter.config import DrafterConfig
from services.drafter.heads.cache import PassRows
from services.drafter.heads.canary.heads import check_checkpoint
from services.drafter.heads.eagle.head import FeatureHead
from services.drafter.heads.files.head_files import load_head
from services.drafter.heads.level_source import CommittedLevelSource
from services.drafter.heads.levels import LevelForm, LevelTrees
from services.drafter.heads.pass_attention import PassAttention
from services.drafter.heads.products import multiply_by_kernels
from services.drafter.heads.session import CommittedRows, Due, in_one_call
from services.drafter.sessions.cache_room import MOST_BYTES
from services.drafter.sessions.drawn_proposals import Draw
from services.drafter.sessions.thread import use_threads
from speculation.errors import ConfigurationError

NAME = "peagle"


def make(config: DrafterConfig) -> ParallelSource:
    """For ``catalogue.MAKERS``.

    Raises:
        ConfigurationError: no checkpoint is configured, or it cannot draft for the target; says why.
    """
    trained = config.trained
    folder, target = trained.weights_of(NAME)
    use_threads()
    head = load_head(folder, target, device=trained.device, dtype=getattr(torch, trained.held_dtype))
    if head.config.mask_token_id is None:
        raise ConfigurationError(f"cannot load the head at {folder} as {NAME}: it has no mask token", about=folder)
    multiply_by_kernels(head, trained)
    check_checkpoint(head, folder, target, asked_for=trained.asked_for)
    return ParallelSource(head, window=trained.window, form=LevelForm.of(trained), ahead=config.draft_ahead > 0)


class ParallelSource(CommittedLevelSource):
    """Drafts by EAGLE-3's head with masks.

    Args:
        head: one with a mask token.
        window: most committed rows that a row attends to; no more than the head's own context, for which it was trained.
        form: of the trees.
        draw: draws chains under ``acceptance: rejection``.
        most_bytes: of all sessions' caches.
        ahead: whether drafts may be made ahead, for which sessions keep what their last draft was made of.
    """

    def __init__(
        self,
        head: FeatureHead,
        *,
        window: int,
        form: LevelForm | None = None,
        draw: Draw | None = None,
        most_bytes: int = MOST_BYTES,
        ahead: bool = False,
    ) -> None:
        config, form = head.config, form or LevelForm()
        self._head = head
        # Masks see none behind them: those that nobody asks for are left out.
        self._levels = min(config.levels, form.depth or config.levels)
        super().__init__(
            head,
            LevelTrees(NAME, head, self._levels, form, draw, ahead=ahead),
            layers=config.state_layers,
            missing=head.missing_state.detach(),
            shape=head.cache_shape(window),
            most_bytes=most_bytes,
        )

    @override
    def _compute(self, due: Sequence[Due]) -> dict[int, torch.Tensor]:
        pieces = in_one_call(due)
        ready = [each for each, piece in pieces if len(piece) == len(each.rows)]
        ends = np.cumsum([len(piece) for _, piece in pieces])
        last = [int(end) - 1 for (each, piece), end in zip(pieces, ends, strict=True) if len(piece) == len(each.rows)]
        with self._computing(pieces, self._levels) as committed:
            hidden = self._pass(pieces, committed, ready)
        masks = hidden[int(ends[-1]) :].view(len(ready), self._levels - 1, hidden.shape[-1])
        levels = torch.cat((hidden[last][:, None], masks), dim=1)
        return {each.place: own for each, own in zip(ready, levels, strict=True)}

    def _pass(
        self, pieces: Sequence[tuple[Due, CommittedRows]], committed: Sequence[PassRows], ready: Sequence[Due]
    ) -> torch.Tensor:
        """[rows, h], what the output layer reads of committed rows and, behind all of these, of masks."""
        count, device = self._levels - 1, self._shape.device
        before = np.tri(count, dtype=np.bool_)
        behind = [each.session.cache.tree(before) for each in ready if count]
        masks = count * len(ready)
        tokens = np.concatenate([piece.tokens for _, piece in pieces] + [np.full(masks, self._head.config.mask_token_id)])
        positions = [piece.positions for _, piece in pieces]
        positions += [each.rows.positions[-1] + 1 + np.arange(count) for each in ready]
        states = torch.cat([piece.states for _, piece in pieces] + [self._missing.expand(masks, -1)])
        output = self._head(
            self._head.embed(torch.from_numpy(tokens).to(device))[None],
            self._head.fuse(states)[None],
            torch.from_numpy(np.concatenate(positions)).to(device)[None],
            PassAttention([*committed, *behind]),
        )
        hidden: torch.Tensor = output.hidden[0]
        return hidden
