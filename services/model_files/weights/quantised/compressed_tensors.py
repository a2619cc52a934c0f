"""compressed-tensors, as llm-compressor and vLLM write it: groups of layers, each with its bits, type and scales.

Whole numbers are packed into words (``pack-quantized``) or stored in a byte each (``int-quantized``), FP8 as it is
(``float-quantized``, ``mxfp8-quantized``), floats of four bits two to a byte (``nvfp4-pack-quantized``,
``mxfp4-pack-quantized``). Layers of a group may round what enters them (``input_activations``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from services.model_files.weights.described import Tensor
from services.model_files.weights.quantised import targets
from services.model_files.weights.quantised.activations import InputActivations
from services.model_files.weights.quantised.as_blocks import codes_as_blocks, likely_kind
from services.model_files.weights.quantised.fields import QuantisationFields
from services.model_files.weights.quantised.four_bit_floats import MX_BLOCK, NV_BLOCK, codes_of, floats, mx_weight
from services.model_files.weights.quantised.fp8 import CODES, powers_scaled, scaled
from services.model_files.weights.quantised.integers import groups_in_order, scaled_integers
from services.model_files.weights.quantised.packed import Packed, Stored, expect, groups_of, parts_of, spread, unpacked
from services.model_files.weights.stored_blocks import BLOCK, Weight

_PACKED = ".weight_packed"
_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
    "mxfp8-quantized", "mixed-precision", "dense",
)  # fmt: skip
_SCALES = ("F16", "BF16", "F32")
_STRATEGIES = {"int": ("tensor", "channel", "group"), "float": ("tensor", "channel", "block", "group", "tensor_group")}


class CompressedTensors:
    """The method ``compressed-tensors``.

    Raises:
        ConfigurationError: a field has a value that is not served.
    """

    def __init__(self, fields: QuantisationFields) -> None:
        fields.one_of("format", _FORMATS, "dense")
        fields.one_of("quantization_status", ("compressed", "frozen"), "compressed")
        fields.empty("kv_cache_scheme", "keys and values are not quantised here")
        fields.empty("transform_config", "transforms of weights are not read")
        if fields.get("sparsity_config"):
            fields.part("sparsity_config").one_of("format", ("dense",))
        self._ignored = fields.names("ignore")
        self._groups = [_Group(group) for group in fields.part("config_groups").parts()]

    @property
    def name(self) -> str:
        """What users call it."""
        return f"compressed-tensors, {', '.join(dict.fromkeys(group.name for group in self._groups))}"

    @property
    def entering(self) -> str:
        """How layers round what enters them; empty: none does."""
        return " or ".join(dict.fromkeys(group.activations.name for group in self._groups if group.activations.name))

    def find(self, tensors: Mapping[str, Tensor]) -> list[Packed]:
        """The weights of the layers that a group names."""
        found = []
        for name, tensor in tensors.items():
            if name.endswith(_PACKED):
                layer = name.removesuffix(_PACKED)
                group = self._group_of(layer, name)
                made = group.words(tensors, layer) if group.type == "int" else group.four_bits(tensors, layer)
            elif name.endswith(".weight") and tensor.dtype in (*CODES, "I8"):
                layer = name.removesuffix(".weight")
                group = self._group_of(layer, name)
                made = group.bytes(tensors, layer)
            else:
                continue
            entering, parts = group.activations.of_layer(tensors, layer, made.shape[-1], name)
            found.append(replace(made, entering=entering, parts={**made.parts, **parts}))
        return found

    def _group_of(self, layer: str, name: str) -> _Group:
        if targets.meant(layer, self._ignored):
            raise ValueError(f"{name} is quantised, though quantization_config.ignore names {layer}")
        named = (group for group in self._groups if targets.meant(layer, group.targets))
        others = (group for group in self._groups if targets.meant_by_class(group.targets))
        found = next(named, None) or next(others, None)
        if found is None:
            raise ValueError(f"{name} is quantised, though no group of quantization_config.config_groups names {layer}")
        return found


class _Group:
    """How the layers are stored that a group of ``config_groups`` names."""

    def __init__(self, fields: QuantisationFields) -> None:
        self.targets = fields.names("targets")
        for target in self.targets:
            try:
                re.compile(target.removeprefix("re:"))
            except re.error as error:
                raise fields.refusal("targets", "names, or re: and a pattern", f"{error}") from error
        fields.empty("output_activations", "what leaves a layer would be rounded, which is not served")
        self.activations = InputActivations(fields)
        weights = fields.part("weights")
        self.type: str = weights.one_of("type", ("int", "float"), "int")
        self.bits: int = weights.one_of("num_bits", (2, 3, 4, 5, 6, 7, 8) if self.type == "int" else (4, 8), 8)
        self.symmetric: bool = weights.one_of("symmetric", (True, False), True)
        size = weights.get("group_size")
        usual = "channel" if size == -1 else "tensor" if size is None else "group"
        self.strategy: str = weights.one_of("strategy", _STRATEGIES[self.type], usual)
        self.size = weights.count("group_size") if self.strategy in ("group", "tensor_group") else None
        self.block = self._block(weights) if self.strategy == "block" else None

    @staticmethod
    def _block(weights: QuantisationFields) -> tuple[int, int]:
        given = weights.get("block_structure")
        if not isinstance(given, list | tuple) or len(given) != 2 or any(type(n) is not int or n < 1 for n in given):
            raise weights.refusal("block_structure", "two whole numbers from 1 on")
        return given[0], given[1]

    @property
    def name(self) -> str:
        """What users call it."""
        shared = {"tensor": "weight", "channel": "output", "block": "block"}.get(self.strategy, f"group of {self.size}")
        kind = "whole numbers" if self.type == "int" else "floats"
        return f"{kind} of {self.bits} bits with a scale for each {shared}"

    def bytes(self, tensors: Mapping[str, Tensor], layer: str) -> Packed:
        """A weight with a byte for each number."""
        codes, scales = f"{layer}.weight", f"{layer}.weight_scale"
        if self.type == "float" and self.strategy == "group":
            return powers_scaled(tensors, codes, scales, self.size)
        if self.type == "float":
            return scaled(tensors, codes, scales, self.block)
        parts = parts_of(tensors, {"codes": codes, "scales": scales, **self._zeros(layer)}, self._order(layer))
        outputs, inputs = _matrix(tensors, codes)
        self._check_scales(tensors, parts, (outputs, inputs), ("I8",))
        expand = partial(_bytes, size=self.size or inputs, layer=layer)
        return Packed(
            name=codes, shape=(outputs, inputs), parts=parts, expand=expand, dtype=self._kind(tensors, parts, inputs)
        )

    def words(self, tensors: Mapping[str, Tensor], layer: str) -> Packed:
        """A weight whose codes are packed into words."""
        named = {"codes": f"{layer}{_PACKED}", "scales": f"{layer}.weight_scale", "shape": f"{layer}.weight_shape"}
        parts = parts_of(tensors, {**named, **self._zeros(layer)}, self._order(layer))
        outputs, words = _matrix(tensors, parts["codes"])
        shape = (outputs, words * 32 // self.bits)
        expect(tensors, parts["codes"], ("I32",), [(outputs, words)])
        self._check_scales(tensors, parts, shape, ("I32",))
        expand = partial(_words, bits=self.bits, shape=shape, size=self.size or shape[1], layer=layer)
        kind = self._kind(tensors, parts, shape[1])
        return Packed(name=f"{layer}.weight", shape=shape, parts=parts, expand=expand, dtype=kind)

    def four_bits(self, tensors: Mapping[str, Tensor], layer: str) -> Packed:
        """A weight of floats with four bits."""
        codes, scales, whole = f"{layer}{_PACKED}", f"{layer}.weight_scale", f"{layer}.weight_global_scale"
        nvidia = self.strategy == "tensor_group"
        parts = parts_of(tensors, {"codes": codes, "scales": scales, **({"whole": whole} if nvidia else {})})
        outputs, half = _matrix(tensors, codes)
        block = NV_BLOCK if nvidia else MX_BLOCK
        if self.size != block or self.bits != 4:
            raise ValueError(
                f"{codes} has floats of {self.bits} bits in groups of {self.size}: must be 4 bits in groups of {block}"
            )
        groups, why = groups_of(half * 2, block, layer), f"as {codes} is {tensors[codes]}"
        expect(tensors, codes, ("U8",), [(outputs, half)])
        expect(tensors, scales, ("F8_E4M3",) if nvidia else ("U8",), [(outputs, groups)], why)
        if nvidia:
            expect(tensors, whole, ("F32",), [(1,), ()])
        expand, dtype = (_nvfp4, "F32" if half * 2 % BLOCK else "E2M1") if nvidia else (_mxfp4, "MXFP4")
        return Packed(name=f"{layer}.weight", shape=(outputs, half * 2), parts=parts, expand=expand, dtype=dtype)

    def _kind(self, tensors: Mapping[str, Tensor], parts: Mapping[str, str], inputs: int) -> str:
        return likely_kind(self.bits, self.symmetric, self.size or inputs, tensors[parts["scales"]].dtype)

    def _zeros(self, layer: str) -> dict[str, str]:
        return {} if self.symmetric else {"zeros": f"{layer}.weight_zero_point"}

    @staticmethod
    def _order(layer: str) -> dict[str, str]:
        """Which group an input belongs to, where the inputs were quantised in another order."""
        return {"groups": f"{layer}.weight_g_idx"}

    def _check_scales(
        self, tensors: Mapping[str, Tensor], parts: Mapping[str, str], shape: tuple[int, int], zeros: tuple[str, ...]
    ) -> None:
        outputs, inputs = shape
        groups = groups_of(inputs, self.size or inputs, parts["scales"])
        why = f"as {parts['codes']} is {tensors[parts['codes']]}, {self.name}"
        allowed = [(outputs, groups)] if self.strategy != "tensor" else [(1,), (), (1, 1)]
        expect(tensors, parts["scales"], _SCALES, allowed, why)
        if "zeros" in parts:
            packed = [(-(-outputs * self.bits // 32), groups)] if zeros == ("I32",) else allowed
            expect(tensors, parts["zeros"], zeros, packed, why)
        if "groups" in parts:
            expect(tensors, parts["groups"], ("I32", "I64"), [(inputs,)], why)


def _matrix(tensors: Mapping[str, Tensor], name: str) -> tuple[int, int]:
    if len(tensors[name].shape) != 2:
        raise ValueError(f"{name} is {tensors[name]}: must be a matrix")
    return tensors[name].shape[0], tensors[name].shape[1]


def _bytes(stored: Stored, size: int, layer: str) -> Weight:
    codes, zeros = stored["codes"], stored.get("zeros")
    scales = _for_outputs(stored["scales"], len(codes))
    groups = _groups(stored, scales, size, layer)
    return scaled_integers(codes, 0 if zeros is None else _for_outputs(zeros, len(codes)), scales, groups)


def _words(stored: Stored, bits: int, shape: tuple[int, int], size: int, layer: str) -> Weight:
    said = tuple(stored["shape"].tolist())
    if said != shape:
        raise ValueError(
            f"{layer}.weight_shape says {list(said)}: must be {list(shape)}, what {layer}{_PACKED} has room for"
        )
    scales = _for_outputs(stored["scales"], shape[0])
    packed = stored.get("zeros")
    # Codes and zero points are stored without their sign: both are greater by the same number.
    zeros = 1 << (bits - 1) if packed is None else unpacked(packed.T, bits)[:, : shape[0]].T
    return scaled_integers(unpacked(stored["codes"], bits), zeros, scales, _groups(stored, scales, size, layer))


def _for_outputs(values: torch.Tensor, outputs: int) -> torch.Tensor:
    """[outputs, groups], where there may be one value for the whole weight."""
    return values.view(1, 1).expand(outputs, 1) if values.numel() == 1 else values


def _groups(stored: Stored, scales: torch.Tensor, size: int, layer: str) -> torch.Tensor | int:
    named = stored.get("groups")
    return size if named is None else groups_in_order(named, scales.shape[1], size, f"{layer}.weight_g_idx")


def _nvfp4(stored: Stored) -> Weight:
    scales = stored["scales"].float() / stored["whole"].view(())
    codes = codes_of(stored["codes"])
    if codes.shape[1] % BLOCK == 0:
        return codes_as_blocks("E2M1", codes, scales)
    numbers = floats(stored["codes"])
    return numbers * spread(scales, tuple(numbers.shape), (1, NV_BLOCK))


def _mxfp4(stored: Stored) -> Weight:
    return mx_weight(stored["codes"], stored["scales"])
