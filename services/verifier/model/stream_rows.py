"""Stream rows: they enter the pass of all other rows at one of the target's last layers, with given states.

A row's streams (Bhendawade et al., 2402.11131, section 3.1.1) begin as the state that the row has there, plus a trained
embedding each. They are computed by the same weights, with low-rank adapters of their own; they attend as branches of the
tree (``attention.stream_layout``), are never accepted, and leave no keys behind: what follows overwrites theirs. No bit of
any other row changes: a row's numbers do not depend on what else its pass holds, and adapters act on stream rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from services.verifier.attention.calls import Pass, Running
from services.verifier.attention.stream_layout import with_streams
from services.verifier.kernels.native.layer_kernel import FusedLayer
from services.verifier.kernels.native.low_rank_kernel import LowRank
from services.verifier.model.early_exit import EarlyExit, Pruning
from services.verifier.model.target_port import Rows
from speculation.errors import ConfigurationError

# Lays out a pass whose entries end in so many stream rows each.
LayOut = Callable[[Sequence[Rows], Sequence[int]], Pass]
_Hook = torch.utils.hooks.RemovableHandle
_Turns = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StreamWeights:
    """Trained streams.

    Attributes:
        where: their checkpoint, for errors.
        embeddings: [streams, hidden size].
        adapters: of each of the target's last layers, the first one first: by the name of a linear layer in it.
        pruning: which rows have none after all; None: none of those that were chosen.
    """

    where: str
    embeddings: torch.Tensor
    adapters: tuple[Mapping[str, LowRank], ...]
    pruning: Pruning | None = None

    def check(self, ranks: int, *, with_states: bool) -> None:
        """Check that they can be computed in the target's own pass.

        Raises:
            ConfigurationError: they cannot, over ranks and where layers have states.
        """
        if with_states:
            raise ConfigurationError(
                f"cannot serve the streams at {self.where} in the target's pass: it has layers with a state",
                about=self.where,
            )
        if ranks > 1:
            raise ConfigurationError(
                "streams in the target's pass need 1; use drafter.streaming_form: two_steps",
                field="verifier.tensor_parallel_size",
                value=ranks,
            )


@dataclass(kw_only=True, slots=True)
class _Under:
    """A pass with stream rows under way.

    Attributes:
        main: number of its other rows, padding included.
        turns: the rotations of all rows, once the stream rows have entered.
    """

    batch: Sequence[Rows]
    running: Running
    lay_out: LayOut
    main: int
    turns: _Turns | None = None
    hooks: list[_Hook] = field(default_factory=list)


class StreamRows:
    """Stream rows of passes through the last pipeline stage.

    Args:
        model: the stage's.
        total: number of layers of the whole model.
        dtype: of the rows. A norm's weights may have another one.

    Attributes:
        streams: of a row.
        first: the layer at which they enter; ``share``: of all layers that they go through.

    Raises:
        ConfigurationError: the streams are not for this model, or its layers cannot take stream rows; says why.
    """

    def __init__(
        self, model: PreTrainedModel, total: int, weights: StreamWeights, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._where = weights.where
        self._decoder = model.get_decoder()
        self.streams, self._hidden_size = weights.embeddings.shape
        self.first, self.share = total - len(weights.adapters), len(weights.adapters) / total
        own = list(getattr(self._decoder, "layers", ()))
        if len(weights.adapters) > len(own):
            raise self._refused(
                f"they run through the last {len(weights.adapters)} layers, and the last pipeline stage has {len(own)}: use "
                "fewer stages, or drafter.streaming_form: two_steps"
            )
        for part in ("norm", "rotary_emb"):
            if not isinstance(getattr(self._decoder, part, None), nn.Module):
                raise self._refused(f"{type(model).__name__} has no {part}, so that no stream row can enter")
        if "dynamic" in str(getattr(self._decoder.rotary_emb, "rope_type", "")):
            raise self._refused("the rotations of all rows change with the longest text in a pass")
        self._layers: list[nn.Module] = own[len(own) - len(weights.adapters) :]
        self._embeddings = weights.embeddings.to(device, dtype)
        self._exit = self._early_exit(model, weights.pruning, device, dtype)
        self._adapters = [
            {name: self._checked(layer, name, each).to(device, dtype) for name, each in adapters.items()}
            for layer, adapters in zip(self._layers, weights.adapters, strict=True)
        ]
        for layer, adapters in zip(self._layers, self._adapters, strict=True):
            if isinstance(layer.forward, FusedLayer):
                layer.forward.adapt_streams(adapters)
        # Of the last pass: where the streams of (request, row) begin among its stream rows, and what the output layer reads.
        self._begins: dict[tuple[str, int], int] = {}
        self._made = self._embeddings[:0]

    def states(self, request_id: str, row: int) -> torch.Tensor:
        """[streams, hidden size], what the output layer reads of a row's streams in the last pass; zeros: it had none."""
        begin = self._begins.get((request_id, row))
        return torch.zeros_like(self._embeddings) if begin is None else self._made[begin : begin + self.streams]

    @contextmanager
    def within(self, batch: Sequence[Rows], main: int, running: Running, lay_out: LayOut) -> Iterator[None]:
        """Let the model's pass hold the streams of ``batch``'s ends.

        Args:
            main: number of the pass's other rows, padding included.
        """
        self._begins = {}
        if not any(rows.ends for rows in batch):
            yield
            return
        under = _Under(batch=batch, running=running, lay_out=lay_out, main=main)
        try:
            self._hook(under)
            yield
        finally:
            for hook in under.hooks:
                hook.remove()

    def _hook(self, under: _Under) -> None:
        """The layers have hooks only while such a pass runs, so other passes pay nothing."""
        for number, (layer, adapters) in enumerate(zip(self._layers, self._adapters, strict=True)):
            enter = partial(self._go_on if number else self._enter, under)
            under.hooks.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
            if not isinstance(layer.forward, FusedLayer):
                for name, adapter in adapters.items():
                    add = partial(_add, adapter, under.main)
                    under.hooks.append(layer.get_submodule(name).register_forward_hook(add))
        under.hooks.append(self._decoder.norm.register_forward_hook(partial(self._leave, under)))

    def _enter(self, under: _Under, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        hidden: torch.Tensor = given[0]
        batch = under.batch if self._exit is None else self._exit.pruned(under.batch, hidden[0])
        ends = self._note(batch)
        if not ends:
            return given, named
        counts = [len(rows.ends) * self.streams for rows in batch]
        laid_out = under.lay_out([with_streams(rows, self.streams) for rows in batch], counts)
        begun = hidden[0, ends][:, None] + self._embeddings
        rows = torch.cat((hidden, begun.view(1, -1, self._hidden_size)), dim=1)
        own = named.get("position_embeddings")
        if not isinstance(own, tuple) or len(own) != 2:
            raise self._refused(f"{type(layer).__name__} is not given the rotations of its rows' positions")
        behind: _Turns = self._decoder.rotary_emb(rows, laid_out.positions[under.main :][None])
        under.turns = torch.cat((own[0], behind[0]), dim=1), torch.cat((own[1], behind[1]), dim=1)
        under.running.go_on(laid_out)
        return (rows, *given[1:]), {**named, "position_embeddings": under.turns}

    def _go_on(self, under: _Under, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return given, named if under.turns is None else {**named, "position_embeddings": under.turns}

    def _note(self, batch: Sequence[Rows]) -> list[int]:
        """The rows of the pass that have streams; where each one's begin is kept."""
        ends: list[int] = []
        begin = 0
        for rows in batch:
            for end in rows.ends:
                self._begins[rows.request_id, end] = len(ends) * self.streams
                ends.append(begin + end)
            begin += len(rows.tokens)
        return ends

    def _leave(self, under: _Under, norm: nn.Module, given: object, made: torch.Tensor) -> torch.Tensor:
        self._made = made[0, under.main :]
        return made[:, : under.main]

    def _early_exit(
        self, model: PreTrainedModel, pruning: Pruning | None, device: torch.device, dtype: torch.dtype
    ) -> EarlyExit | None:
        if pruning is None:
            return None
        adapter = pruning.adapter
        if (adapter.down.shape[1], adapter.up.shape[0]) != (self._hidden_size,) * 2:
            made_for = (adapter.down.shape[1], adapter.up.shape[0])
            raise self._refused(f"its early exit is for states of {made_for}, the target's have {self._hidden_size}")
        return EarlyExit(
            replace(pruning, adapter=adapter.to(device, dtype)), self._decoder.norm, model.get_output_embeddings()
        )

    def _checked(self, layer: nn.Module, name: str, adapter: LowRank) -> LowRank:
        try:
            part: Any = layer.get_submodule(name)
            own = (int(part.in_features), int(part.out_features))
        except AttributeError as error:
            raise self._refused(f"{type(layer).__name__} has no linear layer {name}") from error
        made_for = (adapter.down.shape[1], adapter.up.shape[0])
        if own != made_for or self._hidden_size != self._decoder.config.hidden_size:
            raise self._refused(f"an adapter of {name} is for a layer of {made_for}, the target's is of {own}")
        return adapter

    def _refused(self, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"cannot serve the streams at {self._where} in the target's pass: {why}", about=self._where
        )


def _add(
    adapter: LowRank, main: int, module: nn.Module, given: tuple[torch.Tensor, ...], made: torch.Tensor
) -> torch.Tensor:
    stream_rows = given[0][..., main:, :]
    return torch.cat((made[..., :main, :], made[..., main:, :] + adapter.of(stream_rows)), dim=-2)
