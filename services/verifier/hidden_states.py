"""Hidden states of named decoder layers, of the rows that a pass is asked for (``Rows.layers``).

Hooks are on the layers while such a pass runs, and are gone with it: other passes pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from services.verifier.target_port import Rows
from speculation.errors import InvalidArgument
from speculation.types import Features

# The one name that is no layer's: what the output layer reads, after the final norm.
OUTPUT = -1

Made = TypeVar("Made")


class HiddenStates:
    """Hidden states that a pass leaves: of a pipeline stage's own layers, and what it was handed of earlier stages' layers.

    Args:
        layers: the stage's, counted from the model's first; ``total``: how many the model has.
        head: the output layer, where it is in this stage.
    """

    def __init__(
        self, model: PreTrainedModel, layers: range, total: int, head: nn.Module | None, device: torch.device
    ) -> None:
        self._name, self._device = type(model).__name__, device
        self._layers = layers
        self._total = total
        self._head = head
        self._modules: dict[int, nn.Module] = dict(zip(layers, _layers_of(model, len(layers)), strict=False))
        # Of the last pass: by layer, [rows asked for, hidden size]; and where a request's rows begin among them.
        self._kept: dict[int, torch.Tensor] = {}
        self._starts: dict[str, int] = {}

    def find_layers(self, trial: Callable[[], Made], rows: int) -> Made:
        """Run a trial pass over ``rows`` rows, and see which layers can be observed: those that run once in a pass and make
        a hidden state for every row."""
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
        """Check that hidden states of these layers can be had.

        Raises:
            InvalidArgument: of one they cannot; says which, and what is allowed.
        """
        for layer in layers:
            if layer == OUTPUT:
                continue
            if not self._modules:
                raise InvalidArgument(
                    "observe_layers", layer, f"-1: the layers of {self._name} cannot be observed one by one"
                )
            if not -self._total <= layer < self._total:
                allowed = f"from -{self._total} to {self._total - 1}: the model has {self._total} layers"
                raise InvalidArgument("observe_layers", layer, allowed)

    @contextmanager
    def kept(self, batch: Sequence[Rows], needed: int, earlier: torch.Tensor | None = None) -> Iterator[list[int]]:
        """Keep what a pass is asked for while the model runs.

        Args:
            needed: how many rows' logits are computed.
            earlier: what the stage before has ``handed_on``.

        Yields:
            Rows that the output layer must be given behind the ``needed`` ones; it computes nothing of them.
        """
        self._kept, self._starts = {}, {}
        asked = self._rows_asked(batch)
        if not asked:
            yield []
            return
        if earlier is not None:
            self._kept.update(zip(self._numbers(batch, range(self._layers.start)), earlier.to(self._device), strict=True))
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

    def expected(self, batch: Sequence[Rows]) -> tuple[int, int]:
        """How many layers of earlier stages, and of how many rows, come to this stage with a pass."""
        layers = len(self._numbers(batch, range(self._layers.start)))
        return layers, sum(len(rows.tokens) for rows in batch if rows.layers)

    def handed_on(self, batch: Sequence[Rows]) -> torch.Tensor | None:
        """[layers, rows, hidden size], kept in this stage and before of the pass just run; None: nobody asked."""
        numbers = self._numbers(batch, range(self._layers.stop))
        return torch.stack([self._kept[number] for number in numbers]) if numbers else None

    def features(self, own: Rows, rows: Sequence[int]) -> Features:
        """What was kept of the request whose part of the last pass is ``own``; see ``ports.Target``.

        bfloat16 where the model computes in it, else float16; what float16 cannot hold becomes its greatest number.
        """
        begin = self._starts[own.session_id]
        at = torch.tensor([begin + row for row in rows], dtype=torch.int64, device=self._device)
        states = torch.cat([self._kept[_number(layer, self._total)][at] for layer in own.layers], dim=-1)
        if states.dtype != torch.bfloat16:
            most = torch.finfo(torch.float16).max
            states = states.clamp(-most, most).half()
        return Features(
            data=states.cpu().view(torch.int16).numpy().astype("<i2").tobytes(),
            rows=len(rows),
            width=states.shape[1],
            dtype="bfloat16" if states.dtype == torch.bfloat16 else "float16",
            start=_position(own, rows[0]) if rows else own.context,
            layers=own.layers,
        )

    def _numbers(self, batch: Sequence[Rows], among: range) -> list[int]:
        """Which of the layers ``among`` somebody asks for; ascending."""
        return sorted({_number(layer, self._total) for rows in batch for layer in rows.layers} & set(among))

    def _rows_asked(self, batch: Sequence[Rows]) -> list[int]:
        """Rows of the pass: all of every request that names a layer."""
        asked: list[int] = []
        begin = 0
        for rows in batch:
            if rows.layers:
                self._starts[rows.session_id] = len(asked)
                asked += range(begin, begin + len(rows.tokens))
            begin += len(rows.tokens)
        return asked

    def _keep(self, number: int, asked: torch.Tensor) -> Callable[..., None]:
        def hook(module: nn.Module, given: object, made: object) -> None:
            # A copy: later layers may add to what they were given.
            self._kept[number] = _hidden(made)[0, asked]

        return hook

    def _take_behind(self, needed: int) -> Callable[..., tuple[Any, ...]]:
        def hook(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            read: torch.Tensor = given[0]
            self._kept[self._total] = read[0, needed:].clone()
            return (read[:, :needed], *given[1:])

        return hook


def _number(layer: int, total: int) -> int:
    """``layer`` counted from the first one, which is 0; ``OUTPUT`` comes behind the last."""
    if layer == OUTPUT:
        return total
    return layer if layer >= 0 else total + layer


def _position(own: Rows, row: int) -> int:
    """Of a row, in its request."""
    depth, node = 0, row - own.chain
    while node >= 0:
        depth, node = depth + 1, own.parents[node]
    return own.context + (own.chain - 1 + depth if depth else row)


def _hidden(made: Any) -> torch.Tensor:
    """Some layers make more than hidden states: those come first."""
    first: torch.Tensor = made if isinstance(made, torch.Tensor) else made[0]
    return first


def _layers_of(model: PreTrainedModel, count: int) -> nn.ModuleList:
    """The model's list of ``count`` decoder layers; empty: it has none. Most have it in what they call their decoder."""
    modules = (module for part in (model.get_decoder(), model) for module in part.modules())
    found = (module for module in modules if isinstance(module, nn.ModuleList) and len(module) == count)
    return next(found, nn.ModuleList())
