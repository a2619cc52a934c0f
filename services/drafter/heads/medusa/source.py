"""Medusa's heads as a source of drafts: the state of the last committed row gives all levels of a tree at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from services.drafter.config import DrafterConfig
from services.drafter.heads.canary.levels import check_levels_at
from services.drafter.heads.choosing_session import ChoosingSession
from services.drafter.heads.files.head_config import FINAL
from services.drafter.heads.level_source import LevelSource
from services.drafter.heads.levels import LevelForm, LevelTrees
from services.drafter.heads.medusa.files import load_medusa
from services.drafter.heads.medusa.heads import MedusaHeads
from services.drafter.heads.products import multiply_by_kernels
from services.drafter.heads.session import state_numbers
from services.drafter.sessions.thread import use_threads
from services.drafter.sources.interfaces import DraftWanted
from speculation.messages import OpenSession

NAME = "medusa"
_LAYERS = (FINAL,)


def make(config: DrafterConfig) -> MedusaSource:
    """For ``catalogue.MAKERS``.

    Raises:
        ConfigurationError: no checkpoint is configured, or it cannot draft for the target; says why.
    """
    trained = config.trained
    folder, target = trained.weights_of(NAME)
    use_threads()
    heads = load_medusa(folder, target, device=trained.device, dtype=getattr(torch, trained.held_dtype))
    multiply_by_kernels(heads, trained)
    check_levels_at(heads, folder, target, asked_for=trained.asked_for)
    return MedusaSource(heads, form=LevelForm.of_medusa(trained), ahead=config.draft_ahead > 0)


class MedusaSource(LevelSource):
    """Nothing is computed for a text but from its last state, so that nothing is caught up.

    Args:
        form: of the trees.
        ahead: whether drafts may be made ahead, for which sessions keep what their last draft was made of.
    """

    def __init__(self, heads: MedusaHeads, *, form: LevelForm | None = None, ahead: bool = False) -> None:
        super().__init__(LevelTrees(NAME, heads, heads.config.num_heads, form or LevelForm(), ahead=ahead))
        self._heads = heads
        rows = heads.vocabulary.rows
        self._like = torch.zeros(heads.config.hidden_size, dtype=rows.dtype, device=rows.device)

    def open(self, message: OpenSession) -> ChoosingSession:
        return ChoosingSession(message, self._heads.beyond(message.tokens[: message.prompt_length]))

    @override
    def _guess(self, batch: Sequence[DraftWanted]) -> dict[int, torch.Tensor]:
        due: dict[int, torch.Tensor] = {}
        for place, wanted in enumerate(batch):
            # The last committed token has not been through the target yet.
            row = wanted.states.of(len(wanted.session.tokens) - 2, _LAYERS) if wanted.max_nodes else None
            if row is not None:
                due[place] = state_numbers(row, _LAYERS, self._like)
        return dict(zip(due, self._heads(torch.cat(list(due.values()))), strict=True)) if due else {}
