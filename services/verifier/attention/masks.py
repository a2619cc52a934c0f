"""Which positions a row sees, found out from the mask functions of transformers' models.

Such a function says whether the query at one position sees the key at another. Its answers for many positions show which of
three kinds it is: everything up to the row's own position, a sliding window, or chunks. No other kind can be served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# Called with batch, head, position of the query and position of the key.
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_SAMPLES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """How far back rows see; given to the model in place of its mask.

    Attributes:
        window, chunk: as in ``attention.calls.Call``.
        reason: why this mask cannot be served. It matters only if a layer uses the mask, since models make unused ones, too.
    """

    window: int | None = None
    chunk: int | None = None
    reason: str = ""

    # Some models look at their mask's dimensions, slice it, or convert it to another dtype.
    ndim = 0

    def _refused(self, *_: object) -> Sight:
        raise NotImplementedError("it computes with its attention mask")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __invert__ = __lt__ = _refused

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._refused()

    def __getitem__(self, part: object) -> Sight:
        return self

    def to(self, *_: object, **__: object) -> Sight:
        return self

    def first_seen(self, positions: torch.Tensor) -> torch.Tensor:
        """The first position that each of ``positions`` sees."""
        if self.chunk is not None:
            return positions - positions % self.chunk
        return (positions - (self.window or len(positions) + 1) + 1).clamp(min=0)


def sight_of(function: MaskFunction, longest: int, device: torch.device) -> Sight:
    """The kind of mask that a function makes, for positions below ``longest``; if it cannot be served, with a reason."""
    try:
        return _kind_of(function, longest, device)
    except NotImplementedError as error:
        return Sight(reason=str(error))


def _kind_of(function: MaskFunction, longest: int, device: torch.device) -> Sight:
    positions = torch.arange(longest, device=device)

    def sees(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        none = torch.zeros((), dtype=torch.int64, device=device)
        query, key = query + torch.zeros_like(key), key + torch.zeros_like(query)
        try:
            return torch.as_tensor(function(none, none, query, key), device=device).expand(query.shape).bool()
        except (IndexError, RuntimeError) as error:
            raise NotImplementedError("its attention mask depends on more than positions") from error

    if bool(sees(positions[:-1], positions[1:]).any()):
        raise NotImplementedError("its attention is not causal: rows see what comes after them")
    sight = Sight()
    blind = (~sees(positions, positions[:1])).nonzero()
    if len(blind) and (size := int(blind[0])):
        sight = Sight(chunk=size) if not bool(sees(positions[size], positions[size - 1])) else Sight(window=size)
    rows = positions[:: max(1, longest // _SAMPLES)]
    rows = torch.cat([positions[:_SAMPLES], rows, positions[-2:]])
    first = sight.first_seen(positions)
    expected = (positions <= rows[:, None]) & (positions >= first[rows][:, None])
    edges = sees(positions, first).all() and not sees(positions[first > 0], first[first > 0] - 1).any()
    if not bool(edges) or not torch.equal(sees(rows[:, None], positions), expected):
        raise NotImplementedError("its attention mask is neither causal, nor a sliding window, nor chunks")
    return sight
