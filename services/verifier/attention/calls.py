"""Tree attention over the pool, plugged into transformers' attention interface.

A pass lays the rows of all requests side by side in one sequence of batch size one. The model hands each layer's queries,
keys and values to ``attend``; the pass stores the new keys and values in the pool and lets every row see its own request:
the committed tokens, and its ancestors in the tree.

How a model calls attention, and how often, is recorded once (``recording``); ever after, it must call it like that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig

NAME = "outrider"

# Most nodes of one request's tree. Up to 192 terms torch's matrix products add strictly from the first to the last on the
# CPUs that we know; tiled_attention multiplies by a tile and the tree behind it.
MAX_NODES = 128


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Bias:
    """What is added to a score for where its key is (alibi).

    Attributes:
        table: [heads, positions], float32.
        by_distance: indexed by the query's position less the key's, rather than by the key's own.
    """

    table: torch.Tensor
    by_distance: bool = False

    def of(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[heads, ...], of queries at positions ``rows`` and keys at positions ``slots``, broadcast; made up where nobody
        sees: for keys behind their queries."""
        index = rows - slots if self.by_distance else slots + torch.zeros_like(rows)
        return self.table[:, index.clamp(0, self.table.shape[1] - 1)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """One of the attention calls of a pass, in what it never changes.

    Attributes:
        entry: where the pool keeps its keys and values.
        heads: of queries; ``kv_heads`` of keys and values.
        key_size: of a query or key under one head; ``value_size`` of a value.
        scale: of the scores.
        window: a row sees so many positions, its own included; None: all up to its own.
        chunk: a row sees none before its own chunk of so many positions.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: [heads], float32, scores of a key that nobody's value belongs to.
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
        """Query heads to a key-value head."""
        return self.heads // self.kv_heads

    def unseen(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor | None:
        """Which positions ``slots`` lie too far back for those of ``rows``, broadcast; None: nothing ever does."""
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


# By the module that calls, in its own order.
Calls = Mapping[nn.Module, tuple[Call, ...]]


class Pass(Protocol):
    """What one forward pass needs besides its token ids.

    What a row's attention is summed up from is added in the order of positions, so that a token gets the same bits, whether
    it is prefilled, decoded alone, or checked among other drafts.
    """

    @property
    def positions(self) -> torch.Tensor:
        """[rows], of each row in its own request."""
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
    """What a model says of a call besides its tensors; see ``Call``. ``mask`` is what the model has made of masks.

    ``others`` holds what only some models say.
    """

    mask: object
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    bias: Bias | None
    others: Mapping[str, object]


class Attends(Protocol):
    """Whom ``attend`` asks: a pass that runs, or one that is recorded."""

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: Given
    ) -> torch.Tensor:
        """Tensors as in ``Pass.attend``, with a first dimension of 1."""
        ...


# Handed around the model, since not every architecture hands keyword arguments down to its attention layers.
_asked: ContextVar[Attends | None] = ContextVar("asked", default=None)


@contextmanager
def answering(one: Attends) -> Iterator[None]:
    """Let ``one`` answer what the model asks of attention."""
    before = _asked.set(one)
    try:
        yield
    finally:
        _asked.reset(before)


class Running:
    """A pass through a model whose calls are known."""

    def __init__(self, laid_out: Pass, calls: Calls) -> None:
        self._pass = laid_out
        self._calls = calls
        # How often modules that call several times have done so.
        self._done: dict[nn.Module, int] = {}

    @property
    def laid_out(self) -> Pass:
        """Where the rows lie."""
        return self._pass

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: Given
    ) -> torch.Tensor:
        """See ``Attends``.

        Raises:
            NotImplementedError: the model calls attention otherwise than it did at first.
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
    """Who answers what the model asks of attention.

    Raises:
        NotImplementedError: nobody: no pass runs.
    """
    one = _asked.get()
    if one is None:
        raise NotImplementedError("no pass runs")
    return one


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
        outrider_bias: from our adapters.

    Returns:
        [1, rows, heads, value size], in the type of ``query``.

    Raises:
        NotImplementedError: no pass runs, or the architecture needs something of attention that this does not do.
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
    """Let every part of a model compute by the attention that ``name_of`` names for its configuration, for a while."""
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
