"""What the training loop trains: a model with its loss on sequences of the target's text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import nn

from training.shards import TrainingSequence


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over the predictions of a part of a batch.

    Attributes:
        loss: scalar; gradients flow through it.
        rows: how many predictions it is the sum of.
        overlap: the sum of the chances that the first drafted token is accepted.
        parts: sums of what the loss is made of, by name, of the first drafted token and without weights; none where it is
            one thing.
    """

    loss: torch.Tensor
    rows: int
    overlap: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a model gives for the tokens of answers, a number of tokens ahead.

    Attributes:
        hidden: [n, h], what the output layer reads; with ``own_rows`` as in ``compare``.
        states: float32 [n, h], what the target gave to it.
        positions: int64 [n], numbers of the positions of these states among all of the batch: no two are equal.
    """

    hidden: torch.Tensor
    states: torch.Tensor
    positions: torch.Tensor


class Learner(Protocol):
    """A model in training.

    Attributes:
        module: its parameters that require a gradient are trained and saved.
        rows: [V_d, h] the target's output rows of the draft vocabulary.
        ids: int64 [V_d] its tokens, ascending.
    """

    @property
    def module(self) -> nn.Module: ...

    @property
    def rows(self) -> torch.Tensor: ...

    @property
    def ids(self) -> torch.Tensor: ...

    @property
    def own_rows(self) -> torch.Tensor | None:
        """[V_d, k], output rows that are trained, see ``compare``; None: the target's alone."""
        ...

    def lose(self, sequences: Sequence[TrainingSequence], random: np.random.Generator, progress: float) -> Tally:
        """The loss on some sequences.

        Args:
            random: for what the recipe leaves to chance.
            progress: share of the steps that have been made, 0 to 1.
        """
        ...

    def predict(self, sequences: Sequence[TrainingSequence], steps: int) -> Iterator[Prediction]:
        """For every step, what the model gives after so many tokens of the text on its own states."""
        ...


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: each for name, each in module.named_parameters() if each.requires_grad}
