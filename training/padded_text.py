"""Sequences side by side, for models that guess several tokens ahead from some of their positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from training.shards import TrainingSequence


@dataclass(frozen=True, slots=True)
class PaddedText:
    """Sequences side by side, padded behind their ends.

    Attributes:
        tokens: int64 [B, T].
        states: float32 [B, T, width], the target's, see ``StateColumns``.
        known: bool [B, T], whether the state is there.
        begins: for each sequence, the first position that a drafter is asked to draft from.
        ends: for each sequence, the position of its last token.
    """

    tokens: torch.Tensor
    states: torch.Tensor
    known: torch.Tensor
    begins: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, sequences: Sequence[TrainingSequence], most: int, device: torch.device) -> PaddedText:
        """The last ``most`` tokens of each sequence."""
        first = [max(0, len(each.tokens) - most) for each in sequences]
        longest = max(len(each.tokens) - begin for each, begin in zip(sequences, first, strict=True))
        tokens = np.zeros((len(sequences), longest), dtype=np.int64)
        known = np.zeros((len(sequences), longest), dtype=np.bool_)
        states = np.zeros((len(sequences), longest, sequences[0].states.shape[1]), dtype=np.float32)
        for row, (each, begin) in enumerate(zip(sequences, first, strict=True)):
            length = len(each.tokens) - begin
            tokens[row, :length] = each.tokens[begin:]
            known[row, :length] = each.known[begin:]
            states[row, :length] = np.where(each.known[begin:, None], each.states[begin:], 0)
        pairs = list(zip(sequences, first, strict=True))
        return cls(
            tokens=torch.from_numpy(tokens).to(device),
            states=torch.from_numpy(states).to(device),
            known=torch.from_numpy(known).to(device),
            begins=tuple(max(0, each.prompt_length - 1 - begin) for each, begin in pairs),
            ends=tuple(len(each.tokens) - begin - 1 for each, begin in pairs),
        )

    def anchors(self, share: float, random: np.random.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions to guess from: int64 [B, A], ascending, and bool [B, A], which of them are none but fill the array.

        Args:
            share: of the positions with a state and with a token two places on.
            random: chooses them; None: all.
        """
        chosen: list[list[int]] = []
        for row, (begin, end) in enumerate(zip(self.begins, self.ends, strict=True)):
            known = self.known[row].tolist()
            there = [position for position in range(begin, end - 1) if known[position]]
            if random is not None and there:
                there = sorted(random.choice(there, max(1, round(share * len(there))), replace=False).tolist())
            chosen.append(there)
        most = max(1, *(len(each) for each in chosen), 1)
        found = torch.zeros(len(chosen), most, dtype=torch.int64)
        filling = torch.ones(len(chosen), most, dtype=torch.bool)
        for row, positions in enumerate(chosen):
            found[row, : len(positions)] = torch.tensor(positions, dtype=torch.int64)
            filling[row, : len(positions)] = False
        return found.to(self.tokens.device), filling.to(self.tokens.device)

    def labels(
        self, anchors: torch.Tensor, filling: torch.Tensor, level: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a level guesses from ``anchors``: sequence and position of each token's state, [n] each; which of [B, A] they
        belong to.

        Args:
            level: 0 guesses the token after next, -1 the next one.
        """
        ends = torch.tensor(self.ends, device=anchors.device)[:, None]
        at = (anchors + 1 + level).clamp(max=self.tokens.shape[1] - 1)
        row = torch.arange(len(anchors), device=anchors.device)[:, None].expand_as(at)
        counts = ~filling & (anchors + 1 + level < ends) & self.known[row, at]
        return row[counts], at[counts], counts
