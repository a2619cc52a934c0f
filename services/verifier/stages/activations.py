"""A pass on its way from one pipeline stage to the next: a header with its outcome, then activations."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import torch

from services.verifier.model.target_port import Rows
from services.verifier.stages.exchange import Exchange
from speculation.errors import Internal, TargetLost

if TYPE_CHECKING:
    from services.verifier.model.slice import ModelSlice


class Activations(NamedTuple):
    """The input of a stage's layers.

    Attributes:
        hidden: [rows, hidden size], the output of the stage before; None in the first stage, whose input is tokens.
        kept: [layers, rows asked for, hidden size], hidden states of earlier stages' layers that requests ask for; None if
            none does.
    """

    hidden: torch.Tensor | None = None
    kept: torch.Tensor | None = None


class Health(IntEnum):
    """How a pass went in a stage and in the stages before it."""

    FINE = 0
    FAILED = 1
    DISAGREES = 2


def send_activations(exchange: Exchange, health: Health, made: Activations) -> None:
    """Hand a pass on to the next stage; only the header if it has failed.

    Args:
        made: as ``Exchange.ready`` gives them.

    Raises:
        TargetLost: the next stage is gone.
    """
    exchange.send(torch.tensor([health, 0 if made.hidden is None else len(made.hidden)]), exchange.behind).wait()
    for tensor in made:
        if tensor is not None:
            exchange.send_activation(tensor, exchange.behind).wait()


def receive_beat(exchange: Exchange, within_s: float | None = None) -> None:
    """Hear from the stage before that it and those before it are there: a header without activations.

    Args:
        within_s: longest wait in seconds; None: as long as a pass may take.

    Raises:
        TargetLost: it does not answer, or says something else.
    """
    header = torch.empty(2, dtype=torch.int64)
    exchange.receive(header, exchange.before, within_s)
    if header.any():
        raise TargetLost("the stages of the target disagree on what is being asked")


def receive_activations(exchange: Exchange, part: ModelSlice, batch: Sequence[Rows]) -> Activations:
    """Receive a pass from the stage before ``part``.

    Raises:
        Internal: the pass failed there.
        TargetLost: the stages disagree on what was committed, or the stage before is gone.
    """
    header = torch.empty(2, dtype=torch.int64)
    exchange.receive(header, exchange.before)
    health, count = Health(int(header[0])), int(header[1])
    if health is Health.FAILED:
        raise Internal("a stage of the target failed; its log says why")
    rows = sum(len(own.tokens) for own in batch)
    if health is Health.DISAGREES or count != rows:
        raise TargetLost("the stages of the target disagree on what was committed")
    hidden = exchange.receive_activation((rows, part.hidden_size), part.dtype, exchange.before)
    layers, asked = part.hidden_states.expected(batch)
    if not layers:
        return Activations(hidden)
    kept = exchange.receive_activation((layers, asked, part.hidden_size), part.dtype, exchange.before)
    return Activations(hidden, kept)
