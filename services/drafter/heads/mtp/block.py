"""A decoder layer of a kind that transformers has, whose attention is answered by an ``Attend``.

So MTP layers with experts, with latent attention (MLA), or with whatever else their target has, need no code of their own.
"""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface
from typing_extensions import override

from services.drafter.heads.layer import Attend
from services.machine.held_variable import held
from speculation.errors import ConfigurationError

# The name of our attention among transformers' implementations.
ATTENTION = "outrider_mtp"
# Arguments of attention, besides its scale and its window, that change what it computes.
_UNSERVED = ("softcap", "s_aux")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSizes:
    """What a layer's attention hands over.

    Attributes:
        calls: how often a pass attends.
        heads: of keys and values.
        width: of the wider of keys and values.
        window: most rows that a row sees, itself included; None: all.
    """

    calls: int
    heads: int
    width: int
    window: int | None


class DecoderBlock(nn.Module):
    """A layer of a transformers model with ``ATTENTION``.

    Args:
        rotary: computes its position embeddings.
        where: the checkpoint, for errors.

    Attributes:
        sizes: found by a trial.

    Raises:
        ConfigurationError: it attends in a way that is not implemented; says how.
    """

    def __init__(self, layer: nn.Module, rotary: nn.Module, size: int, where: str) -> None:
        super().__init__()
        self.layer = layer
        self._rotary = rotary
        self.sizes = self._try(size, where)

    @override
    def forward(self, rows: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """[B, R, h] at positions [B, R] to [B, R, h]."""
        made: torch.Tensor = self._run(rows, positions, _Answers(attend))
        return made

    def _run(self, rows: torch.Tensor, positions: torch.Tensor, answers: _Answers) -> Any:
        with held(_running, answers):
            turns = self._rotary(rows, positions)
            return self.layer(rows, attention_mask=None, position_ids=positions, position_embeddings=turns)

    @torch.no_grad()
    def _try(self, size: int, where: str) -> AttentionSizes:
        answers = _Answers(lambda query, key, value, call: query)
        like = next(self.layer.parameters())
        rows, positions = like.new_zeros(1, 1, size), torch.zeros(1, 1, dtype=torch.int64, device=like.device)
        kind = type(self.layer).__name__
        try:
            made = self._run(rows, positions, answers)
        except ConfigurationError:
            raise
        except Exception as error:
            # Layers that were never tried may fail in any way.
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise ConfigurationError(f"cannot load the MTP layer at {where}: {kind}: {reason}", about=where) from error
        if answers.sizes is None or not isinstance(made, torch.Tensor) or made.shape != rows.shape:
            raise ConfigurationError(
                f"cannot load the MTP layer at {where}: {kind} does not attend through transformers' attention interface",
                about=where,
            )
        return answers.sizes


class _Answers:
    """Answers the attention calls of one pass, in their order."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self.sizes: AttentionSizes | None = None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, window: int | None
    ) -> torch.Tensor:
        """[B, heads, R, ...] each, to [B, R, heads, value width]."""
        call = 0 if self.sizes is None else self.sizes.calls
        wide, given, made = max(key.shape[3], value.shape[3]), key.shape[3], value.shape[3]
        self.sizes = AttentionSizes(calls=call + 1, heads=key.shape[1], width=wide, window=window)
        # ``Attend`` divides scores by the root of the width.
        query = query * (math.sqrt(wide) * (given**-0.5 if scale is None else scale))
        query, key = (functional.pad(each, (0, wide - given)) for each in (query, key))
        found = self._attend(query, key, functional.pad(value, (0, wide - made)), call)
        return found[..., :made].transpose(1, 2)


# A context variable, since not every layer hands keyword arguments down to its attention.
_running: ContextVar[_Answers | None] = ContextVar("running", default=None)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """For transformers' ``AttentionInterface``."""
    for name in _UNSERVED:
        if others.get(name) is not None:
            raise ConfigurationError(
                field=f"{name} of {type(module).__name__} in an MTP layer",
                value=others[name],
                allowed="null: it is not implemented",
            )
    answers = _running.get()
    assert answers is not None
    return answers.attend(query, key, value, scaling, sliding_window), None


AttentionInterface.register(ATTENTION, _attend)
