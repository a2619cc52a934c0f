"""What every head of hidden states that feeds its own states back can do: EAGLE's family and MTP layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from services.drafter.heads.cache import CacheShape
from services.drafter.heads.draft_choice import StateDrafter
from services.drafter.heads.draft_vocabulary import DraftVocabulary
from services.drafter.heads.layer import TextAttend


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOutput:
    """What a head computed for its rows.

    Attributes:
        hidden: [B, R, h], what the output layer reads.
        state: [B, R, h], the state of the next position, as far as the head knows it: fed back as ``states``.
    """

    hidden: torch.Tensor
    state: torch.Tensor


class StateHead(StateDrafter, Protocol):
    """A head. Row i of a text is (embedding of token i + 1, state of position i), at position i; it predicts token i + 2.

    The state is the target's wherever it is known, and else the one that the head itself fed back.
    """

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Layers of the target whose states it reads, in this order; see ``Features.layers``."""
        ...

    @property
    def levels(self) -> int | None:
        """Most tokens that it guesses one after the other; None: any number."""
        ...

    @property
    def missing_state(self) -> torch.Tensor:
        """[h_t * layers], takes the place of a state of the target that is not known."""
        ...

    def alternatives(self, *, fed_back: bool) -> Iterator[tuple[str, Self]]:
        """The same tensors under another value of a flag that public checkpoints leave open or set wrong.

        Args:
            fed_back: flags that act on fed back states alone, rather than those that act on all rows.

        Yields:
            What would have to be set, in words, and the head that results.
        """
        ...

    def beyond(self, tokens: Iterable[int]) -> DraftVocabulary | None:
        """As ``SharedOutput.beyond``."""
        ...

    def cache_shape(self, window: int) -> CacheShape:
        """The shape of its sessions' caches, if rows see ``window`` committed rows at most."""
        ...

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., h_e] of target tokens [...]."""
        ...

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [..., h_t * layers] to what a pass reads [..., h]."""
        ...

    def rows_behind(self, tokens: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What rows read that stand behind rows of the text: [1, R, h_e] embeddings, and [1, R, h] states.

        Args:
            tokens: [R], drafted behind these rows.
            state: [1, R, h], their ``HeadOutput.state``.
        """
        ...

    def __call__(
        self, embeddings: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: TextAttend
    ) -> HeadOutput:
        """One pass over rows.

        Args:
            embeddings: [B, R, h_e], of the tokens after the rows' positions.
            states: [B, R, h], fused ones of the target or ``HeadOutput.state``.
            positions: [B, R] int64.
            attend: which rows each row sees, and which comes before it; see ``TextAttend``. It keeps keys and
                values, if anyone does.
        """
        ...
