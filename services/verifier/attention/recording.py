"""Records a model's calls in a trial pass: what the KV cache must hold, how each call attends, and which layers have states.

The fields of a configuration for heads, sizes and windows mean different things in different architectures, or are missing.
A pass over a few rows shows the facts: the modules that call, how often, their tensors' shapes, and the mask.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from services.verifier.attention.calls import Call, Calls, Given, answering, asked, attend, computing_by
from services.verifier.attention.masks import MaskFunction, Sight, sight_of
from services.verifier.loading.adapters import inputs_of
from services.verifier.loading.part_sizes import SteppedRows
from services.verifier.recurrence.convolution import ShortConvolution
from services.verifier.recurrence.recurrence import Recurrence

# Under this name models make masks as well; under ``calls.NAME`` they make none, since a pass knows what its rows see.
_RECORDED = "outrider_recorded"

# Keyword arguments of attention calls that change nothing here: a pass knows its positions and which rows see which.
_HARMLESS = {
    "is_causal", "position_ids", "output_attentions", "output_hidden_states", "output_router_logits", "use_cache",
    "cache_position", "head_mask", "layer_idx", "return_dict", "logits_to_keep",
}  # fmt: skip


class Recorded(NamedTuple):
    """What a model calls in a pass.

    Attributes:
        calls: its attention calls.
        state_shapes: shape of one request's state in each of its layers with a state, in the order of their calls.
        stepped: what these layers hold of rows.
    """

    calls: Calls
    state_shapes: tuple[tuple[int, ...], ...]
    stepped: SteppedRows


class _Recorder:
    """Answers calls with zeros, and notes them. ``longest``: see ``record``."""

    def __init__(self, longest: int | None) -> None:
        self.calls: dict[nn.Module, tuple[Call, ...]] = {}
        self.state_shapes: list[tuple[int, ...]] = []
        self.stepped = SteppedRows()
        self._longest = longest
        self._count = 0

    def sight(self, function: MaskFunction, device: torch.device) -> Sight:
        """What a mask function of the model lets rows see."""
        assert self._longest is not None
        return sight_of(function, self._longest, device)

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: Given
    ) -> torch.Tensor:
        """As ``Attends.attend``.

        Raises:
            NotImplementedError: no pass could serve the call.
        """
        _check(query, key, value, given)
        sight = self._seen(given)
        call = Call(
            entry=self._count,
            heads=query.shape[1],
            kv_heads=key.shape[1],
            key_size=key.shape[3],
            value_size=value.shape[3],
            scale=given.scale,
            window=sight.window,
            chunk=sight.chunk,
            softcap=given.softcap,
            sinks=None if given.sinks is None else given.sinks.detach().float().flatten().contiguous(),
            bias=given.bias,
        )
        self.calls[module] = (*self.calls.get(module, ()), call)
        self._count += 1
        return query.new_zeros(1, query.shape[2], call.heads, call.value_size)

    def step(self, recurrence: Recurrence, given: torch.Tensor) -> torch.Tensor:
        """As ``Attends.step``."""
        self.state_shapes.append(recurrence.state_shape)
        # A convolution finds a row's inputs by its links: none of its states is put aside.
        own = 0 if isinstance(recurrence, ShortConvolution) else math.prod(recurrence.state_shape)
        noted, put_aside = self.stepped
        self.stepped = SteppedRows(noted=noted + given.shape[-1], put_aside=max(put_aside, own))
        return given.new_zeros(len(given), recurrence.width)

    def _seen(self, given: Given) -> Sight:
        if self._longest is None:
            return Sight()
        if given.mask is None:
            raise NotImplementedError("its attention is not causal: rows see what comes after them")
        if not isinstance(given.mask, Sight):
            raise NotImplementedError("it adds a mask of its own to the scores of attention")
        if given.mask.reason:
            raise NotImplementedError(given.mask.reason)
        if given.window is not None and given.window < self._longest and given.window != given.mask.window:
            raise NotImplementedError(f"a layer's sliding window is {given.window}, that of its mask {given.mask.window}")
        return given.mask


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: Given) -> None:
    if others := sorted(name for name, what in given.others.items() if what is not None and name not in _HARMLESS):
        raise NotImplementedError(f"attention with {', '.join(others)} is not supported")
    if given.sinks is not None and given.sinks.numel() != query.shape[1]:
        raise NotImplementedError(f"its attention sinks are {tuple(given.sinks.shape)}: must be one for each head")
    rows = query.shape[2]
    if not key.shape[2] == value.shape[2] == rows or key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
        raise NotImplementedError(f"its attention is not over its own rows: query, key and value are {shapes}")


@torch.inference_mode()
def record(model: PreTrainedModel, entering: torch.Tensor, longest: int | None, *, part: bool = False) -> Recorded:
    """The calls of a pass through the model.

    Args:
        entering: [1, rows] token ids, or [1, rows, hidden size] hidden states of the stage before.
        longest: masks are examined up to this position; None: not at all, so that the meta device works, too.
        part: the model has some of its layers, so that none of them may attend or have a state.

    Raises:
        NotImplementedError: the model's attention cannot be served; says why.
    """
    recorder = _Recorder(longest)
    positions = torch.arange(entering.shape[1], device=entering.device)[None]
    given = {"input_ids" if entering.dim() == 2 else "inputs_embeds": entering}
    if longest is None:
        # Without a mask, some models look for padding among the tokens, whose values the meta device does not have.
        given["attention_mask"] = torch.ones_like(positions)
    with answering(recorder), nullcontext() if longest is None else _asking_for_masks(model):
        model(**given, **inputs_of(model, positions), use_cache=False)
    if not (recorder.calls or recorder.state_shapes or part):
        raise NotImplementedError("its attention layers do not call transformers' attention interface")
    return Recorded(recorder.calls, tuple(recorder.state_shapes), recorder.stepped)


def _mask(**given: Any) -> Sight:
    """Replaces transformers' functions that build masks."""
    recorder = asked()
    assert isinstance(recorder, _Recorder)
    return recorder.sight(given["mask_function"], torch.device(given["device"]))


def _asking_for_masks(model: nn.Module) -> AbstractContextManager[None]:
    AttentionInterface.register(_RECORDED, attend)
    AttentionMaskInterface.register(_RECORDED, _mask)
    return computing_by(model, lambda _: _RECORDED)
