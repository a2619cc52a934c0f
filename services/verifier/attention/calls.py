"""Tree attention over the KV cache, plugged into transformers' attention interface.

A pass puts the rows of all requests into one sequence, with a batch size of one. The model hands each layer's queries, keys
and values to ``attend``. The pass stores the new keys and values in the pool, and lets every row see its own request: the
committed tokens, and its ancestors in the tree.

How a model calls attention, and how often, is recorded once (``recording``); every later pass must call it the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig

from services.machine.held_variable import held
from services.verifier.recurrence.recurrence import Recurrence, Steps

NAME = "outrider"

# Positions that attention sums up at a time: a tile. The keys and values of one tile fill one block of the KV cache.
TILE = 64

# Most nodes of one request's tree. On the CPUs that we know, torch's matrix products of up to 192 terms add strictly from
# the first to the last; ``tiled`` multiplies by a tile and the tree behind it.
MAX_NODES = 128


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Bias:
    """A bias that is added to a score by the position of its key (alibi).

    Attributes:
        table: [heads, positions], float32.
        by_distance: whether it is indexed by the query's position minus the key's, rather than by the key's own.
    """

    table: torch.Tensor
    by_distance: bool = False

    def of(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[heads, ...], for queries at positions ``rows`` and keys at positions ``slots``, broadcast.

        Meaningless for keys after their query, which no row sees.
        """
        index = rows - slots if self.by_distance else slots + torch.zeros_like(rows)
        return self.table[:, index.clamp(0, self.table.shape[1] - 1)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """One of a pass's attention calls: what is the same in every pass.

    Attributes:
        entry: index of its keys and values in the pool.
        heads: number of query heads.
        kv_heads: number of key-value heads.
        key_size: size of one head's query or key.
        value_size: size of one head's value.
        scale: factor of the scores.
        window: number of positions that a row sees, its own included; None: all up to its own.
        chunk: a row sees no position before its own chunk of this many positions.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: [heads], float32, the score of a further key that has no value.
        bias: added to scores after ``softcap``.
    """

    entry: int
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    bias: Bias | None = None

    @property
    def share(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads

    def unseen(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor | None:
        """Which positions ``slots`` lie too far back for the positions ``rows``, broadcast; None if none ever does."""
        hidden = None
        if self.window is not None:
            hidden = rows - slots >= self.window
        if self.chunk is not None:
            before = slots < rows - rows % self.chunk
            hidden = before if hidden is None else hidden | before
        return hidden

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores after ``softcap``."""
        return scores if self.softcap is None else (scores / self.softcap).tanh() * self.softcap


# The calls of each module, in their order.
Calls = Mapping[nn.Module, tuple[Call, ...]]


class Pass(Protocol):
    """What one forward pass needs besides its token ids.

    A row's attention is summed up in the order of positions, so that a token gets the same bits whether it is prefilled,
    decoded alone, or checked in a tree.
    """

    @property
    def positions(self) -> torch.Tensor:
        """[rows], int64: the position of each row in its request."""
        ...

    def attend(self, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Store the rows' keys and values, and attend.

        Args:
            query: [heads, rows, key size].
            key: [key-value heads, rows, key size].
            value: [key-value heads, rows, value size].

        Returns:
            [rows, heads, value size].
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Given:
    """The arguments of a model's call besides its tensors; see ``Call``. ``mask`` is the model's own.

    ``others``: arguments that only some models give.
    """

    mask: object
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    bias: Bias | None
    others: Mapping[str, object]


class Attends(Protocol):
    """Answers ``attend``: a pass that runs, or one that is recorded."""

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: Given
    ) -> torch.Tensor:
        """Tensors as in ``Pass.attend``, with a first dimension of 1."""
        ...

    def step(self, recurrence: Recurrence, given: torch.Tensor) -> torch.Tensor:
        """As ``Steps.step``."""
        ...


# A context variable, since not every architecture passes keyword arguments down to its attention layers.
_asked: ContextVar[Attends | None] = ContextVar("asked", default=None)


def answering(one: Attends) -> AbstractContextManager[None]:
    """Let ``one`` answer the model's attention calls."""
    return held(_asked, one)


class Running:
    """Answers the calls of a running pass; each must match a recorded one.

    Args:
        steps: answers layers with a state; None: the model has none.
    """

    def __init__(self, laid_out: Pass, calls: Calls, steps: Steps | None = None) -> None:
        self._pass = laid_out
        self._calls = calls
        self._steps = steps
        # Calls so far of modules that call several times in a pass.
        self._done: dict[nn.Module, int] = {}

    @property
    def laid_out(self) -> Pass:
        """The pass that it runs."""
        return self._pass

    def go_on(self, laid_out: Pass) -> None:
        """Run the model's further layers over these rows, of which the first ones are those so far."""
        self._pass = laid_out

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: Given
    ) -> torch.Tensor:
        """As ``Attends.attend``.

        Raises:
            NotImplementedError: the model does not call attention as it did when it was recorded.
        """
        call = self._next(module)
        rows = len(self._pass.positions)
        fits = (
            query.shape == (1, call.heads, rows, call.key_size)
            and key.shape == (1, call.kv_heads, rows, call.key_size)
            and value.shape == (1, call.kv_heads, rows, call.value_size)
        )
        if not fits or given.scale != call.scale or given.softcap != call.softcap:
            found = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
            raise NotImplementedError(f"its attention changes from pass to pass: {found}, scale {given.scale}")
        return self._pass.attend(call, query[0], key[0], value[0])[None]

    def step(self, recurrence: Recurrence, given: torch.Tensor) -> torch.Tensor:
        """As ``Steps.step``.

        Raises:
            NotImplementedError: the model had no layers with a state when it was recorded.
        """
        if self._steps is None:
            raise NotImplementedError("it has layers with a state, which it had not at first")
        return self._steps.step(recurrence, given)

    def _next(self, module: nn.Module) -> Call:
        own = self._calls.get(module, ())
        if len(own) == 1:
            return own[0]
        done = self._done.get(module, 0)
        if done == len(own):
            raise NotImplementedError(f"{type(module).__name__} calls attention {done + 1} times, at first {done}")
        self._done[module] = done + 1
        return own[done]


def asked() -> Attends:
    """What answers the model's attention calls now.

    Raises:
        NotImplementedError: no pass runs.
    """
    one = answerer()
    if one is None:
        raise NotImplementedError("no pass runs")
    return one


def answerer() -> Attends | None:
    """As ``asked``; None: no pass runs."""
    return _asked.get()


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    outrider_bias: Bias | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """One attention call of a model; the signature is transformers'.

    Args:
        query: [1, heads, rows, key size].
        key: [1, key-value heads, rows, key size].
        value: [1, key-value heads, rows, value size].
        outrider_bias: given by our adapters.

    Returns:
        [1, rows, heads, value size], in the dtype of ``query``.

    Raises:
        NotImplementedError: no pass runs, or the architecture needs a kind of attention that is not supported.
    """
    given = Given(
        mask=attention_mask,
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        bias=outrider_bias,
        others=others,
    )
    return asked().attend(module, query, key, value, given).to(query.dtype), None


@contextmanager
def computing_by(model: nn.Module, name_of: Callable[[PreTrainedConfig], str]) -> Iterator[None]:
    """Within the context, every part of a model uses the attention that ``name_of`` names for its configuration."""
    found = [
        config for module in model.modules() for config in vars(module).values() if isinstance(config, PreTrainedConfig)
    ]
    before = [(config, config._attn_implementation) for config in {id(config): config for config in found}.values()]
    try:
        for config, _ in before:
            config._attn_implementation = name_of(config)
        yield
    finally:
        for config, own in before:
            config._attn_implementation = own


def register() -> None:
    """Make ``attn_implementation="outrider"`` known to transformers."""
    AttentionInterface.register(NAME, attend)
