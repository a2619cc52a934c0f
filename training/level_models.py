"""What the learner of levels trains: Medusa's heads, and streams over the target's own layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from services.drafter.heads.draft_vocabulary import SharedOutput
from services.drafter.heads.files.head_config import TargetShape
from services.drafter.heads.medusa.config import MedusaConfig
from services.drafter.heads.medusa.heads import MedusaHeads
from services.drafter.heads.streams.config import StreamsConfig
from services.drafter.heads.streams.files import new_streams
from services.drafter.heads.streams.whole_texts import at, main_and_streams
from services.model_files.folder import reading
from training.levels_learner import EARLY, Guesses
from training.padded_text import PaddedText
from training.recipe import MedusaRecipe, StreamsRecipe


class GuessingHeads:
    """Implements ``Guessing``: Medusa's heads, which begin as the target's own guess of the next token."""

    def __init__(self, recipe: MedusaRecipe, shape: TargetShape, output: SharedOutput) -> None:
        self.module = MedusaHeads(
            MedusaConfig(
                hidden_size=shape.hidden_size,
                vocab_size=shape.vocab_size,
                draft_vocab_size=len(output.ids),
                num_heads=recipe.heads,
                num_blocks=recipe.blocks,
            ),
            output,
        )
        for parameter in self.module.parameters():
            nn.init.zeros_(parameter)

    def guess(self, text: PaddedText, anchors: torch.Tensor) -> Guesses:
        found: torch.Tensor = self.module(at(text.states, anchors).flatten(0, 1))
        return by_level(found.unflatten(0, anchors.shape))  # type: ignore[no-untyped-call]


class GuessingStreams:
    """Implements ``Guessing``: streams, and the target's own rows where adapters act on these, too. Main rows are computed
    once for each batch.

    With ``kept_states``, the first numbers of the text's states are what the layers read that streams run through.

    Args:
        folder: of the target, as it is served.
        floats: gives the folder of the target with weights that transformers reads.
    """

    def __init__(
        self, recipe: StreamsRecipe, shape: TargetShape, output: SharedOutput, folder: Path, floats: Callable[[], Path]
    ) -> None:
        self._alone = recipe.pruning_alone
        config = StreamsConfig(
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            draft_vocab_size=len(output.ids),
            num_streams=recipe.streams,
            num_layers=recipe.stream_layers,
            target_layers=shape.num_layers,
            rank=recipe.rank,
            alpha=float(recipe.rank),
            pruning_rank=recipe.pruning_rank,
            shared=recipe.main_weight > 0,
        )
        self.module = new_streams(config, folder, shape, output, torch.Generator().manual_seed(recipe.seed))
        self._below = None if recipe.kept_states else _lower_layers(floats(), shape.num_layers - recipe.stream_layers)

    @property
    def inside(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Gives the states [B, T, h] that streams begin with, of tokens [B, T]; None: the data hold them."""
        return None if self._below is None else self._states

    def guess(self, text: PaddedText, anchors: torch.Tensor) -> Guesses:
        read = self.inside
        states = text.states[..., : self.module.config.hidden_size] if read is None else read(text.tokens)
        early = self.module.early(at(states, anchors))
        found = {} if early is None else {EARLY: early}
        if self._alone:
            return found
        main, streams = main_and_streams(self.module, states, anchors)
        return found | ({EARLY: main} if self.module.config.shared else {}) | by_level(streams)

    @torch.no_grad()
    def _states(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self._below is not None
        if self._below.device != tokens.device:
            self._below.to(tokens.device)
        # Padding stands behind the text, where no row of it looks.
        found: torch.Tensor = self._below(input_ids=tokens, use_cache=False).last_hidden_state
        return found


def by_level(hidden: torch.Tensor) -> Guesses:
    """Guesses of [B, A, levels, h]."""
    return dict(enumerate(hidden.unbind(2)))


def _lower_layers(target: Path, count: int) -> Any:
    """The target's embeddings and first ``count`` layers, which give the residual stream: there is no norm behind them."""
    from transformers import AutoModelForCausalLM

    with reading(f"load the target at {target}", about=target):
        model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="sdpa")
    below = model.base_model
    below.layers = below.layers[:count]
    below.config.num_hidden_layers = count
    below.norm = nn.Identity()
    return below.requires_grad_(False).eval()
