"""AWQ in the layout ``gemm``, as AutoAWQ stores it: four bits, eight outputs in a word, in an order of their own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from services.model_files.weights.described import Tensor
from services.model_files.weights.quantised.as_blocks import likely_kind
from services.model_files.weights.quantised.fields import QuantisationFields
from services.model_files.weights.quantised.integers import scaled_integers
from services.model_files.weights.quantised.packed import Packed, Stored, expect, groups_of, parts_of, unpacked
from services.model_files.weights.stored_blocks import Weight

_CODES = ".qweight"
# Where in a word the codes of eight outputs lie.
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class Awq:
    """The method ``awq``.

    Raises:
        ConfigurationError: a field has a value that is not served.
    """

    entering = ""

    def __init__(self, fields: QuantisationFields) -> None:
        fields.one_of("version", ("gemm", "GEMM"), "gemm")
        fields.one_of(fields.named("bits", "w_bit"), (4,), 4)
        fields.one_of("zero_point", (True,), True)
        key = fields.named("group_size", "q_group_size")
        self._size = None if fields.get(key) == -1 else fields.count(key, 128)

    @property
    def name(self) -> str:
        """What users call it."""
        return f"AWQ, 4 bits, {'a group for each output' if self._size is None else f'groups of {self._size}'}"

    def find(self, tensors: Mapping[str, Tensor]) -> list[Packed]:
        """The weights with codes of four bits."""
        return [self._weight(tensors, name.removesuffix(_CODES)) for name in tensors if name.endswith(_CODES)]

    def _weight(self, tensors: Mapping[str, Tensor], layer: str) -> Packed:
        codes = f"{layer}{_CODES}"
        parts = parts_of(tensors, {"codes": codes, "zeros": f"{layer}.qzeros", "scales": f"{layer}.scales"})
        if len(tensors[codes].shape) != 2:
            raise ValueError(f"{codes} is {tensors[codes]}: must be a matrix of words")
        inputs, words = tensors[codes].shape
        size = self._size or inputs
        groups, why = groups_of(inputs, size, layer), f"as {codes} is {tensors[codes]} in groups of {size}"
        expect(tensors, codes, ("I32",), [(inputs, words)])
        expect(tensors, parts["zeros"], ("I32",), [(groups, words)], why)
        expect(tensors, parts["scales"], ("F16", "BF16", "F32"), [(groups, words * 8)], why)
        kind = likely_kind(4, False, size, tensors[parts["scales"]].dtype)
        expand = partial(_expand, size=size)
        return Packed(name=f"{layer}.weight", shape=(words * 8, inputs), parts=parts, expand=expand, dtype=kind)


def _expand(stored: Stored, size: int) -> Weight:
    codes, zeros = (_in_order(stored[part]).contiguous() for part in ("codes", "zeros"))
    return scaled_integers(codes, zeros, stored["scales"].T, size)


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """[inputs or groups, words] to [outputs, inputs or groups]."""
    return unpacked(words, 4).view(len(words), -1, 8)[..., _ORDER].flatten(1).T
