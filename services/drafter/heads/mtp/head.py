"""An MTP layer as a head: fc([norm(embedding) ; norm(state)]), one decoder layer, a norm, the target's output layer.

(DeepSeek-V3, 2412.19437, section 2.2.) With one layer, engines draft several tokens by feeding it its own output.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from services.drafter.heads.cache import CacheShape
from services.drafter.heads.draft_vocabulary import DraftVocabulary, SharedOutput
from services.drafter.heads.files.target_rows import TargetRows
from services.drafter.heads.layer import Attend
from services.drafter.heads.mtp.block import DecoderBlock
from services.drafter.heads.mtp.config import MtpConfig
from services.drafter.heads.state_head import HeadOutput


class MtpHead(nn.Module):
    """Implements ``StateHead``.

    Args:
        norm: makes a norm over h, of the target's kind.
    """

    missing_state: torch.Tensor

    def __init__(self, config: MtpConfig, rows: TargetRows, block: DecoderBlock, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.embed_norm, self.state_norm = norm(), norm()
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.block = block
        self.norm = norm() if config.output_norm else None
        self.register_buffer("missing_state", torch.zeros(size), persistent=False)
        self._rows = rows
        self._output = SharedOutput(rows, torch.arange(config.vocab_size))

    @property
    def state_layers(self) -> tuple[int, ...]:
        return self.config.state_layers

    def alternatives(self, *, fed_back: bool) -> Iterator[tuple[str, MtpHead]]:
        if fed_back and self.norm is None:
            return
        name = "norm_output" if fed_back else "mtp_hidden_states_first"
        flags: dict[str, Any] = {name: not getattr(self.config, name)}
        other = copy.copy(self)
        other.config = replace(self.config, **flags)
        yield f"{name} must be {str(flags[name]).lower()}", other

    @property
    def vocabulary(self) -> DraftVocabulary:
        return self._output.vocabulary

    def beyond(self, tokens: Iterable[int]) -> DraftVocabulary | None:
        return self._output.beyond(tokens)

    def cache_shape(self, window: int) -> CacheShape:
        sizes = self.block.sizes
        return CacheShape(
            layers=sizes.calls,
            heads=sizes.heads,
            width=sizes.width,
            window=min(window, sizes.window or window, self.config.max_positions),
            dtype=self.missing_state.dtype,
            device=self.missing_state.device,
        )

    def rows_behind(self, tokens: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``StateHead``."""
        return self.embed(tokens)[None], state

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._rows.embedding.rows(tokens)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def forward(self, embeddings: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: Attend) -> HeadOutput:
        """See ``StateHead``."""
        pair = (self.embed_norm(embeddings), self.state_norm(states))
        joined = self.fc(torch.cat(pair[::-1] if self.config.mtp_hidden_states_first else pair, dim=-1))
        made = self.block(joined, positions, attend)
        hidden = made if self.norm is None else self.norm(made)
        return HeadOutput(hidden=hidden, state=hidden if self.config.norm_output else made)

    def logits(self, hidden: torch.Tensor, vocabulary: DraftVocabulary) -> torch.Tensor:
        return self._output.logits(hidden, vocabulary)
