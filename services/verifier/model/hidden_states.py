"""Hidden states of decoder layers, for the rows that ask for them (``Rows.layers``).

The layers have hooks only while such a pass runs, so other passes pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from services.machine.device_states import DeviceStates, apart, part_of
from services.verifier.attention.calls import MAX_NODES
from services.verifier.model.graphs import Keep
from services.verifier.model.stream_rows import StreamRows
from services.verifier.model.target_port import Rows, StreamSpec
from services.verifier.model.to_device import to_device
from speculation.errors import InvalidArgument
from speculation.types import Features

# Not a layer: the input of the output layer, after the final norm.
OUTPUT = -1

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fetched:
    """A request's hidden states, where they are read.

    Attributes:
        places: by row of the request, its place in ``numbers``.
        numbers: [rows, numbers of a row] of ``dtype``; on the host its bits.
    """

    places: Mapping[int, int]
    numbers: NDArray[np.int16] | torch.Tensor
    dtype: torch.dtype

    def of(self, rows: Sequence[int]) -> bytes | DeviceStates:
        """The numbers of these rows."""
        at, numbers = [self.places[row] for row in rows], self.numbers
        if not isinstance(numbers, torch.Tensor):
            return numbers[at].astype("<i2").tobytes()
        first = at[0] if at else 0
        if at == list(range(first, first + len(at))):
            return part_of(numbers, first, first + len(at))
        return DeviceStates(numbers[to_device(at, numbers.device, torch.int64)])


class HiddenStates:
    """Keeps hidden states of a pass: of this pipeline stage's layers, and of earlier stages' layers as handed on by them.

    Args:
        layers: the stage's layers, counted from the model's first.
        total: number of layers of the model.
        head: the output layer, if it is in this stage.
        stay: they are read on ``device``, and never copied from it.

    Attributes:
        stream_rows: computes streams, which count as further layers of the row that they belong to; None: there are none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: range,
        total: int,
        head: nn.Module | None,
        device: torch.device,
        *,
        stay: bool = False,
    ) -> None:
        self._name, self._device, self._stay = type(model).__name__, device, stay
        self._layers = layers
        self._total = total
        self._head = head
        self.stream_rows: StreamRows | None = None
        self._modules: dict[int, nn.Module] = dict(zip(layers, _layers_of(model, len(layers)), strict=False))
        # Of the last pass: by layer, [rows asked for, hidden size]; by request, where its rows begin among them; and what is
        # on the host.
        self._kept: dict[int, torch.Tensor] = {}
        self._starts: dict[str, int] = {}
        self._fetched: dict[str, _Fetched] = {}

    def find_layers(self, trial: Callable[[], Made], rows: int) -> Made:
        """Run a trial pass over ``rows`` rows, and check whether the layers can be observed one by one.

        They can if each one runs once in a pass and makes a hidden state for every row; otherwise none is observed.
        """
        shapes: dict[int, list[tuple[int, ...]]] = {number: [] for number in self._modules}

        def note(number: int) -> Callable[..., None]:
            return lambda module, given, made: shapes[number].append(tuple(_hidden(made).shape))

        hooks = [module.register_forward_hook(note(number)) for number, module in self._modules.items()]
        try:
            made = trial()
        finally:
            for hook in hooks:
                hook.remove()
        if any(len(seen) != 1 or len(seen[0]) != 3 or seen[0][:2] != (1, rows) for seen in shapes.values()):
            self._modules = {}
        return made

    def check(self, layers: Iterable[int]) -> None:
        """Check that hidden states of these layers are available.

        Raises:
            InvalidArgument: those of a layer are not; names it and what is allowed.
        """
        for layer in layers:
            if layer == OUTPUT or self._is_stream(layer):
                continue
            if not self._modules:
                raise InvalidArgument(
                    "observe_layers", layer, f"-1: the layers of {self._name} cannot be observed one by one"
                )
            if not -self._total <= layer < self._total:
                allowed = f"from -{self._total} to {self._total - 1}: the model has {self._total} layers"
                raise InvalidArgument("observe_layers", layer, allowed)

    def streams(self, layers: Sequence[int]) -> StreamSpec | None:
        """See ``Target.streams``."""
        own = self.stream_rows
        if own is None or not any(self._is_stream(layer) for layer in layers):
            return None
        two_steps = own.first - 1 in [_number(layer, self._total) for layer in layers]
        return StreamSpec(rows=own.streams, share=own.share, most_rows=MAX_NODES, two_steps=two_steps)

    @contextmanager
    def kept(self, batch: Sequence[Rows], needed: int, earlier: torch.Tensor | None = None) -> Iterator[list[int]]:
        """Keep the hidden states that a pass is asked for, while the model runs.

        Args:
            needed: number of rows whose logits are computed.
            earlier: the result of ``handed_on`` in the stage before.

        Yields:
            Rows that the output layer must be given behind the ``needed`` ones. A hook cuts them off before it computes.
        """
        self._kept, self._starts, self._fetched = {}, {}, {}
        asked = self._rows_asked(batch)
        if not asked:
            yield []
            return
        self._take_earlier(batch, earlier)
        index = torch.tensor(asked, device=self._device)
        hooks = [
            self._modules[number].register_forward_hook(self._keep(number, index))
            for number in self._numbers(batch, self._layers)
        ]
        head = self._head if self._numbers(batch, range(self._total, self._total + 1)) else None
        if head is not None:
            hooks.append(head.register_forward_pre_hook(self._take_behind(needed)))
        try:
            yield asked if head is not None else []
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def of_all_rows(self, layers: Sequence[int], keep: Keep) -> Iterator[dict[int, torch.Tensor]]:
        """Keep the hidden states of every row while the model runs: [rows, hidden size], by layer as ``asked_of`` counts.

        For passes that are captured: what is copied does not depend on who asks. The output layer must be given all rows.

        Args:
            keep: copies them; later layers may add to their input in place.
        """
        found: dict[int, torch.Tensor] = {}

        def after(number: int) -> Callable[..., None]:
            def hook(module: nn.Module, given: object, made: object) -> None:
                found[number] = keep(number, _hidden(made)[0])

            return hook

        def before(module: nn.Module, given: tuple[Any, ...]) -> None:
            found[self._total] = keep(self._total, given[0][0])

        hooks = [self._modules[number].register_forward_hook(after(number)) for number in layers if number in self._layers]
        if self._total in layers and self._head is not None:
            hooks.append(self._head.register_forward_pre_hook(before))
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    def of_stage(self, layers: Iterable[int]) -> tuple[int, ...]:
        """Those of ``layers`` that are in this stage, ascending; the output layer's input is the last number."""
        own = {*self._modules, *(() if self._head is None else (self._total,))}
        return tuple(sorted({_number(layer, self._total) for layer in layers} & own))

    def asked_of(self, batch: Sequence[Rows]) -> tuple[int, ...]:
        """The layers of this stage whose hidden states a pass is asked for."""
        return self.of_stage(layer for rows in batch for layer in rows.layers)

    def keep(self, batch: Sequence[Rows], seen: Mapping[int, torch.Tensor], earlier: torch.Tensor | None) -> None:
        """Keep what a pass was asked for out of ``of_all_rows``; ``earlier`` as in ``kept``."""
        self._kept, self._starts, self._fetched = {}, {}, {}
        index = to_device(self._rows_asked(batch), self._device, torch.int64)
        self._take_earlier(batch, earlier)
        self._kept.update((number, rows[index]) for number, rows in seen.items())

    def _take_earlier(self, batch: Sequence[Rows], earlier: torch.Tensor | None) -> None:
        if earlier is not None:
            self._kept.update(zip(self._numbers(batch, range(self._layers.start)), earlier.to(self._device), strict=True))

    def expected(self, batch: Sequence[Rows]) -> tuple[int, int]:
        """Number of earlier stages' layers, and of rows, whose hidden states arrive at this stage with a pass."""
        layers = len(self._numbers(batch, range(self._layers.start)))
        return layers, sum(len(rows.tokens) for rows in batch if rows.layers)

    def handed_on(self, batch: Sequence[Rows]) -> torch.Tensor | None:
        """[layers, rows, hidden size], kept from the pass just run in this stage and earlier ones; None if nobody asked."""
        numbers = self._numbers(batch, range(self._layers.stop))
        return torch.stack([self._kept[number] for number in numbers]) if numbers else None

    def fetch(self, asked: Sequence[tuple[Rows, Sequence[int]]]) -> None:
        """Take the hidden states of these rows of the last pass's requests: to the host, with a single wait for all of them.

        bfloat16 if the model computes in it, else float16; numbers beyond the range of float16 are clamped to it.
        """
        alike: dict[tuple[int, ...], list[tuple[Rows, Sequence[int]]]] = {}
        for own, rows in asked:
            alike.setdefault(own.layers, []).append((own, rows))
        made = [self._states(some, layers) for layers, some in alike.items()]
        if self._stay:
            for some, states in zip(alike.values(), made, strict=True):
                for (own, rows), kept in zip(some, apart(states, [len(rows) for _, rows in some]), strict=True):
                    self._fetched[own.request_id] = _Fetched(places=_places(rows), numbers=kept, dtype=states.dtype)
            return
        together = made[0].flatten() if len(made) == 1 else torch.cat([states.flatten() for states in made])
        numbers: NDArray[np.int16] = together.cpu().view(torch.int16).numpy()
        for some, states in zip(alike.values(), made, strict=True):
            own_numbers, numbers = numbers[: states.numel()].reshape(states.shape), numbers[states.numel() :]
            begin = 0
            for own, rows in some:
                part = own_numbers[begin : begin + len(rows)]
                self._fetched[own.request_id] = _Fetched(places=_places(rows), numbers=part, dtype=states.dtype)
                begin += len(rows)

    def features(self, own: Rows, rows: Sequence[int]) -> Features:
        """The hidden states kept for ``own``, one request's part of the last pass; see ``Target.features`` and ``fetch``."""
        found = self._fetched.get(own.request_id)
        if found is None or not found.places.keys() >= set(rows):
            self.fetch([(own, rows)])
            found = self._fetched[own.request_id]
        return Features(
            data=found.of(rows),
            rows=len(rows),
            width=found.numbers.shape[1],
            dtype="bfloat16" if found.dtype == torch.bfloat16 else "float16",
            start=_position(own, rows[0]) if rows else own.context,
            layers=own.layers,
        )

    def _states(self, asked: Sequence[tuple[Rows, Sequence[int]]], layers: Sequence[int]) -> torch.Tensor:
        """[rows, layers * hidden size] of requests that ask for the same layers, in the type in which they travel."""
        places = [self._starts[own.request_id] + row for own, rows in asked for row in rows]
        at = to_device(places, self._device, torch.int64)
        states = torch.cat([self._of_layer(asked, at, layer) for layer in layers], dim=-1)
        if states.dtype != torch.bfloat16:
            most = torch.finfo(torch.float16).max
            states = states.clamp(-most, most).half()
        return states

    def _of_layer(self, asked: Sequence[tuple[Rows, Sequence[int]]], at: torch.Tensor, layer: int) -> torch.Tensor:
        """[rows, hidden size]."""
        stream_rows = self.stream_rows
        if stream_rows is None or not self._is_stream(layer):
            return self._kept[_number(layer, self._total)][at]
        rows = [(own.request_id, row) for own, some in asked for row in some]
        return torch.stack([stream_rows.states(name, row)[layer - self._total] for name, row in rows])

    def _is_stream(self, layer: int) -> bool:
        return self.stream_rows is not None and self._total <= layer < self._total + self.stream_rows.streams

    def _numbers(self, batch: Sequence[Rows], among: range) -> list[int]:
        """The layers ``among`` these that a request asks for, ascending."""
        return sorted({_number(layer, self._total) for rows in batch for layer in rows.layers} & set(among))

    def _rows_asked(self, batch: Sequence[Rows]) -> list[int]:
        """All rows of the requests that ask for a layer."""
        asked: list[int] = []
        begin = 0
        for rows in batch:
            if rows.layers:
                self._starts[rows.request_id] = len(asked)
                asked += range(begin, begin + len(rows.tokens))
            begin += len(rows.tokens)
        return asked

    def _keep(self, number: int, asked: torch.Tensor) -> Callable[..., None]:
        def hook(module: nn.Module, given: object, made: object) -> None:
            # Indexing copies: later layers may add to their input in place.
            self._kept[number] = _hidden(made)[0, asked]

        return hook

    def _take_behind(self, needed: int) -> Callable[..., tuple[Any, ...]]:
        def hook(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            read: torch.Tensor = given[0]
            self._kept[self._total] = read[0, needed:].clone()
            return (read[:, :needed], *given[1:])

        return hook


def _places(rows: Sequence[int]) -> dict[int, int]:
    return {row: place for place, row in enumerate(rows)}


def _number(layer: int, total: int) -> int:
    """``layer`` counted from the first one, which is 0; ``OUTPUT`` becomes ``total``, and streams come behind it."""
    if layer == OUTPUT:
        return total
    return layer + (layer >= total) if layer >= 0 else total + layer


def _position(own: Rows, row: int) -> int:
    """The position of a row in its request."""
    depth, node = 0, row - own.chain
    while node >= 0:
        depth, node = depth + 1, own.parents[node]
    return own.context + (own.chain - 1 + depth if depth else row)


def _hidden(made: Any) -> torch.Tensor:
    """The hidden states in a layer's output; if it is a tuple, they come first."""
    first: torch.Tensor = made if isinstance(made, torch.Tensor) else made[0]
    return first


def _layers_of(model: PreTrainedModel, count: int) -> nn.ModuleList:
    """The model's list of ``count`` decoder layers, empty if there is none. Most models have it in their decoder."""
    modules = (module for part in (model.get_decoder(), model) for module in part.modules())
    found = (module for module in modules if isinstance(module, nn.ModuleList) and len(module) == count)
    return next(found, nn.ModuleList())
