"""Weights that models multiply by outside of linear layers: a row's product does not depend on the other rows.

Most products are computed by layers, which can be replaced. Experts, routers and others multiply by parameters of their own,
in classes that differ from model to model. What they call is always the same, though: ``functional.linear``, ``@``, ``bmm``,
on a parameter or a part of it. So the parameter is replaced by a tensor with shape, strides and offset but without numbers.
The first product with it, or with a part of it, shows how it is used. It is then cut into matrices of that shape, which are
packed like any linear layer. A parameter that is never multiplied, or not row by row, stays as it was loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from services.model_files.weights.stacked_blocks import StackedBlocks
from services.model_files.weights.stored_blocks import Weight

_Function = Callable[..., Any]


class SortedProduct(Protocol):
    """Rows times one of several matrices each, which share their rows out one after the other."""

    def __call__(self, rows: torch.Tensor, chosen: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """[rows, inputs] to [rows, outputs]: matrix ``chosen[n]`` has the rows from ``ends[n - 1]`` to ``ends[n]``.

        Args:
            chosen: numbers of matrices, int64.
            ends: likewise.
        """


class PackedLinear(nn.Module):
    """A linear layer with packed weights: a row's result does not depend on the other rows.

    Attributes:
        min_rows: the smallest number of rows for which that holds.
        stored_as: the type of its weights in memory.
    """

    min_rows = 1
    stored_as = "float32"
    in_features: int
    out_features: int
    _bias: torch.Tensor | None

    @property
    def weight(self) -> ExactWeight:
        """[outputs, inputs], for modules that multiply by it themselves.

        Raises:
            AttributeError: the layer has a bias, which is part of its product.
        """
        if self._bias is not None:
            raise AttributeError("a packed layer with a bias has no weight of its own")
        shape = torch.Size((self.out_features, self.in_features))
        form = (*shape, False)
        return ExactWeight.whole(Numbers(owner=type(self).__name__, shape=shape, form=form, packed=[self]))

    @classmethod
    def together(cls, layers: Sequence[PackedLinear]) -> SortedProduct | None:
        """Multiplies by all of ``layers`` in one call; None: they are not alike, or there is no such call."""
        return None


# Takes the weight, [outputs, inputs], and the bias.
MakePacked = Callable[[Weight, torch.Tensor | None], PackedLinear]


@dataclass(kw_only=True, slots=True, eq=False)
class Numbers:
    """The numbers of a parameter: as loaded until the first product, then in packed matrices.

    Attributes:
        owner: class of the module that the parameter belongs to.
        stored: tensor of ``shape`` on the CPU, in float32 or a shorter type, or experts in blocks; None once packed.
        make: packs one matrix.
        form: outputs and inputs of the packed matrices, and whether inputs come first in the parameter.
        packed: the packed matrices, in the order of the parameter.
        together: multiplies by all of these in one call; None: each is called by itself.
        inexact: functions that multiplied by the parameter in another way than row by row.
    """

    owner: str
    shape: torch.Size
    stored: torch.Tensor | StackedBlocks | None = None
    make: MakePacked | None = None
    form: tuple[int, int, bool] | None = None
    packed: list[PackedLinear] = field(default_factory=list)
    together: SortedProduct | None = None
    inexact: set[str] = field(default_factory=set)

    def plain(self) -> torch.Tensor:
        """The parameter in float32."""
        if self.stored is None:
            assert self.form is not None
            _, inputs, inputs_first = self.form
            # A product with the identity gives the exact numbers back.
            columns = [packed(torch.eye(max(inputs, packed.min_rows), inputs))[:inputs] for packed in self.packed]
            self.stored = torch.stack([one if inputs_first else one.T for one in columns]).reshape(self.shape)
        elif isinstance(self.stored, StackedBlocks):
            return self.stored.float()
        elif self.stored.dtype != torch.float32:
            self.stored = self.stored.float()
        return self.stored

    def product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """[..., inputs] to [..., outputs]; None: the product cannot be computed row by row.

        Args:
            weight: [outputs, inputs], a view whose strides and offset say which part of the parameter it is.
        """
        outputs, inputs = weight.shape
        inputs_first = weight.stride() == (1, outputs)
        if not (inputs_first or weight.stride() == (inputs, 1)) or rows.dtype != torch.float32:
            return None
        number, rest = divmod(int(weight.storage_offset()), outputs * inputs)
        if rest or not self._pack((outputs, inputs, inputs_first)):
            return None
        flat = rows.reshape(-1, inputs)
        if not len(flat):
            return rows.new_empty(*rows.shape[:-1], outputs)
        packed = self.packed[number]
        padded = functional.pad(flat, (0, 0, 0, max(0, packed.min_rows - len(flat))))
        made: torch.Tensor = packed(padded)[: len(flat)].contiguous()
        return made.view(*rows.shape[:-1], outputs)

    def sorted_product(
        self, rows: torch.Tensor, chosen: torch.Tensor, ends: torch.Tensor, *, inputs_first: bool
    ) -> torch.Tensor | None:
        """Of rows sorted by matrix, see ``SortedProduct``; None: the matrices cannot be multiplied by in one call.

        Args:
            inputs_first: whether the parameter is [matrices, inputs, outputs].
        """
        first, second = self.shape[-2:]
        form = (second, first, True) if inputs_first else (first, second, False)
        if rows.dtype != torch.float32 or not self._pack(form) or self.together is None:
            return None
        return self.together(rows, chosen, ends)

    def exchange(self, other: Numbers) -> None:
        """Exchange the numbers of two parameters of one shape, packed in the same form."""
        for name in ("stored", "make", "form", "packed", "together"):
            own, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, theirs)
            setattr(other, name, own)

    def pack_as(self, other: Numbers) -> None:
        """Pack the parameter as another one of its shape is, if that is."""
        if other.form is not None:
            self._pack(other.form)

    def _pack(self, form: tuple[int, int, bool]) -> bool:
        """Pack all matrices of the parameter; False: it has been packed in another form, or cannot be cut like this."""
        if self.form is None:
            assert self.stored is not None and self.make is not None
            if (matrices := self._matrices(form)) is None:
                return False
            self.packed = [self.make(one, None) for one in matrices]
            self.form, self.stored, self.together = form, None, type(self.packed[0]).together(self.packed)
        return self.form == form

    def _matrices(self, form: tuple[int, int, bool]) -> Iterable[Weight] | None:
        """All matrices of the parameter, [outputs, inputs]; None: it cannot be cut like this."""
        if isinstance(self.stored, StackedBlocks):
            if self.stored.form == form:
                return self.stored.matrices
            # Blocks lie along the inputs of the matrices as they are stored, whatever multiplies.
            self.stored = self.stored.float()
        assert self.stored is not None
        outputs, inputs, inputs_first = form
        if self.stored.numel() % (outputs * inputs):
            return None
        if not inputs_first:
            return self.stored.view(-1, outputs, inputs)
        return (one.T.contiguous() for one in self.stored.view(-1, inputs, outputs))


class ExactWeight(torch.Tensor):
    """A parameter or a view of one: it has a shape, strides and an offset, but no numbers."""

    numbers: Numbers

    @classmethod
    def whole(cls, numbers: Numbers) -> ExactWeight:
        """The whole parameter."""
        return cls.at(torch.empty(numbers.shape, dtype=torch.float32, device="meta"), numbers)

    @classmethod
    def at(cls, place: torch.Tensor, numbers: Numbers) -> ExactWeight:
        """A view of the parameter. ``place`` is a tensor on the meta device with the shape, strides and offset."""
        made: ExactWeight = torch.Tensor._make_subclass(cls, place)
        made.numbers = numbers
        return made

    @classmethod
    @override
    def __torch_function__(
        cls, func: _Function, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every function with an ExactWeight among its arguments; the signature is torch's."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            handler = _HANDLERS.get(func)
            made = NotImplemented if handler is None else handler(func, *args, **kwargs)
            if made is not NotImplemented:
                return made
            if (name := getattr(func, "__name__", "")) in _PRODUCTS:
                for weight in _weights((args, kwargs)):
                    weight.numbers.inexact.add(name)
            return func(*_plain(args), **_plain(kwargs))


def _weights(given: Any) -> Iterator[ExactWeight]:
    if isinstance(given, ExactWeight):
        yield given
    elif isinstance(given, dict):
        yield from _weights(tuple(given.values()))
    elif isinstance(given, (tuple, list)):
        for one in given:
            yield from _weights(one)


def _plain(given: Any) -> Any:
    """The arguments with real numbers in place of ExactWeights."""
    if isinstance(given, ExactWeight):
        return given.numbers.plain().as_strided(given.shape, given.stride(), given.storage_offset())
    if isinstance(given, dict):
        return {name: _plain(one) for name, one in given.items()}
    return type(given)(_plain(one) for one in given) if type(given) in (tuple, list) else given


def _is_weight(given: object, dimensions: int) -> bool:
    return isinstance(given, ExactWeight) and given.dim() == dimensions


def _linear(_: _Function, rows: Any, weight: Any, bias: Any = None) -> Any:
    """``functional.linear``."""
    if not _is_weight(weight, 2) or isinstance(rows, ExactWeight) or rows.shape[-1] != weight.shape[1]:
        return NotImplemented
    made = weight.numbers.product(rows, weight)
    if made is None:
        return NotImplemented
    return made if bias is None else made + _plain(bias)


def _matmul(func: _Function, first: Any, second: Any) -> Any:
    """``torch.matmul`` of rows and a matrix, of a matrix and columns, or of equally many batches of either."""
    if _is_weight(second, 2):
        return _linear(func, first, _moved(second.t(), second))
    if _is_weight(first, 2) and not isinstance(second, ExactWeight):
        made = _linear(func, second if second.dim() == 1 else second.transpose(-1, -2), first)
        return made if made is NotImplemented or second.dim() == 1 else made.transpose(-1, -2)
    batches = isinstance(first, ExactWeight) and first.dim() > 2 and first.shape[:-2] == second.shape[:-2]
    if batches and not isinstance(second, ExactWeight):
        return _each(func, first, second)
    return _bmm(func, first, second)


def _each(func: _Function, weights: ExactWeight, columns: torch.Tensor) -> Any:
    """[..., outputs, inputs] times [..., inputs, rows]: each matrix by its own columns."""
    made = [_matmul(func, _moved(weights[number], weights), column) for number, column in enumerate(columns)]
    return NotImplemented if any(one is NotImplemented for one in made) else torch.stack(made)


def _rmatmul(func: _Function, second: Any, first: Any) -> Any:
    return _matmul(func, first, second)


def _bmm(func: _Function, rows: Any, weights: Any) -> Any:
    """[experts, rows, inputs] times [experts, inputs, outputs]."""
    if not _is_weight(weights, 3) or isinstance(rows, ExactWeight) or rows.shape[:1] != weights.shape[:1] or rows.dim() != 3:
        return NotImplemented
    made = rows.new_zeros(*rows.shape[:2], weights.shape[2])
    # Some models give every expert all rows, with zeros for those of other experts; zero rows are skipped.
    given = rows.any(-1)
    for number in given.any(-1).nonzero().flatten().tolist():
        product = _matmul(func, rows[number][given[number]], _moved(weights[number], weights))
        if product is NotImplemented:
            return NotImplemented
        made[number, given[number]] = product
    return made


def _addmm(func: _Function, bias: Any, rows: Any, weight: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    if beta != 1 or alpha != 1:
        return NotImplemented
    made = _matmul(func, rows, weight)
    return made if made is NotImplemented else made + _plain(bias)


def _moved(place: torch.Tensor, of: ExactWeight) -> ExactWeight:
    return ExactWeight.at(place, of.numbers)


def _view(func: _Function, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """A part of the parameter, or another order of its dimensions."""
    if not isinstance(weight, ExactWeight) or next(_weights((args, kwargs)), None) is not None:
        return NotImplemented
    made = func(weight, *args, **kwargs)
    if isinstance(made, torch.Tensor):
        return _moved(made, weight)
    return type(made)(_moved(one, weight) for one in made)


def _item(func: _Function, weight: Any, index: Any) -> Any:
    if isinstance(index, torch.Tensor) and index.dim() == 0 and not index.is_floating_point():
        index = int(index)
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, (int, slice)) or part is Ellipsis or part is None for part in parts):
        return NotImplemented
    return _view(func, weight, index)


def _same(func: _Function, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """A conversion that changes nothing."""
    if not isinstance(weight, ExactWeight):
        return NotImplemented
    made = func(torch.empty(0, dtype=torch.float32), *args, **kwargs)
    same = isinstance(made, torch.Tensor) and made.dtype == torch.float32 and made.device.type == "cpu"
    return weight if same else NotImplemented


def _about(func: _Function, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _device(_: _Function, *args: Any) -> torch.device:
    return torch.device("cpu")


def _getters(*names: str) -> list[_Function]:
    return [getattr(torch.Tensor, name).__get__ for name in names]


_T = torch.Tensor
_HANDLERS: dict[_Function, _Function] = {
    functional.linear: _linear,
    **dict.fromkeys([torch.matmul, torch.mm, _T.matmul, _T.mm, _T.__matmul__], _matmul),
    _T.__rmatmul__: _rmatmul,
    **dict.fromkeys([torch.bmm, _T.bmm], _bmm),
    **dict.fromkeys([torch.addmm, _T.addmm, torch.baddbmm, _T.baddbmm], _addmm),
    **dict.fromkeys([torch.transpose, torch.t, torch.unbind, torch.chunk, torch.split, torch.permute, torch.select], _view),
    **dict.fromkeys([_T.transpose, _T.t, _T.unbind, _T.chunk, _T.split, _T.permute, _T.select, _T.narrow], _view),
    **dict.fromkeys([_T.view, _T.squeeze, _T.unsqueeze, *_getters("T", "mT")], _view),
    _T.__getitem__: _item,
    **dict.fromkeys([_T.float, _T.to, _T.type, _T.type_as, _T.contiguous, _T.detach, _T.cpu], _same),
    **dict.fromkeys([_T.size, _T.dim, _T.numel, _T.stride, _T.is_contiguous, _T.__len__, _T.is_floating_point], _about),
    **dict.fromkeys([*_getters("shape", "dtype", "ndim", "requires_grad", "layout"), _T.storage_offset], _about),
    **dict.fromkeys(_getters("device"), _device),
}
# All of torch's names for functions that sum up products.
_PRODUCTS = {"linear", "matmul", "mm", "bmm", "addmm", "__matmul__", "__rmatmul__", "einsum", "tensordot", "mv", "addmv"}
_PRODUCTS |= {"dot", "vdot", "inner", "baddbmm", "addbmm", "bilinear", "grouped_mm", "_grouped_mm", "conv1d", "conv2d"}
