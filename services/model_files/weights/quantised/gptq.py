"""GPTQ, as AutoGPTQ and GPTQModel store it: codes packed along the inputs, zero points along the outputs.

With ``desc_act`` the inputs were quantised in another order than they have, so ``g_idx`` names each one's group. Files of
the first version (``checkpoint_format: gptq``) hold zero points less one, modulo the codes' range.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from services.model_files.weights.described import Tensor
from services.model_files.weights.quantised.as_blocks import likely_kind
from services.model_files.weights.quantised.fields import QuantisationFields
from services.model_files.weights.quantised.integers import groups_in_order, scaled_integers
from services.model_files.weights.quantised.packed import Packed, Stored, expect, groups_of, parts_of, unpacked
from services.model_files.weights.stored_blocks import Weight

_CODES = ".qweight"


class Gptq:
    """The method ``gptq``.

    Raises:
        ConfigurationError: a field has a value that is not served.
    """

    entering = ""

    def __init__(self, fields: QuantisationFields) -> None:
        self._bits: int = fields.one_of("bits", (2, 3, 4, 8))
        self._size = None if fields.get("group_size") == -1 else fields.count("group_size", 128)
        self._ordered: bool = fields.one_of("desc_act", (False, True), False)
        self._symmetric: bool = fields.one_of("sym", (True, False), False)
        self._less: int = 1 if fields.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq" else 0
        fields.empty("dynamic", "layers with fields of their own are not read")
        fields.empty("is_marlin_format", "the layout of the Marlin kernels is not read")

    @property
    def name(self) -> str:
        """What users call it."""
        return f"GPTQ, {self._bits} bits, {'a group for each output' if self._size is None else f'groups of {self._size}'}"

    def find(self, tensors: Mapping[str, Tensor]) -> list[Packed]:
        """The weights with packed codes."""
        return [self._weight(tensors, name.removesuffix(_CODES)) for name in tensors if name.endswith(_CODES)]

    def _weight(self, tensors: Mapping[str, Tensor], layer: str) -> Packed:
        codes = f"{layer}{_CODES}"
        named = {"codes": codes, "zeros": f"{layer}.qzeros", "scales": f"{layer}.scales"}
        groups = {"groups": f"{layer}.g_idx"}
        parts = parts_of(tensors, {**named, **groups} if self._ordered else named, groups)
        if len(tensors[codes].shape) != 2:
            raise ValueError(f"{codes} is {tensors[codes]}: must be a matrix of words")
        words, outputs = tensors[codes].shape
        inputs = words * 32 // self._bits
        size = self._size or inputs
        count, why = (
            groups_of(inputs, size, layer),
            f"as {codes} is {tensors[codes]} with {self._bits} bits in groups of {size}",
        )
        expect(tensors, codes, ("I32",), [(words, outputs)])
        expect(tensors, parts["zeros"], ("I32",), [(count, -(-outputs * self._bits // 32))], why)
        expect(tensors, parts["scales"], ("F16", "BF16", "F32"), [(count, outputs)], why)
        if "groups" in parts:
            expect(tensors, parts["groups"], ("I32", "I64"), [(inputs,)], why)
        expand = partial(_expand, bits=self._bits, size=size, less=self._less, layer=layer)
        kind = likely_kind(self._bits, self._symmetric, size, tensors[parts["scales"]].dtype)
        return Packed(name=f"{layer}.weight", shape=(outputs, inputs), parts=parts, expand=expand, dtype=kind)


def _expand(stored: Stored, bits: int, size: int, less: int, layer: str) -> Weight:
    scales = stored["scales"].T
    codes = unpacked(stored["codes"].T, bits)
    zeros = (unpacked(stored["zeros"], bits)[:, : len(scales)].T + less) & ((1 << bits) - 1)
    named = stored.get("groups")
    groups = size if named is None else groups_in_order(named, scales.shape[1], size, f"{layer}.g_idx")
    return scaled_integers(codes, zeros, scales, groups)
