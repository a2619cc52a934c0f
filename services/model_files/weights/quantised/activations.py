"""``input_activations`` of compressed-tensors: how what enters the layers of a group is rounded."""

from __future__ import annotations

from collections.abc import Mapping

from services.model_files.weights.described import Tensor
from services.model_files.weights.quantised.fields import QuantisationFields
from services.model_files.weights.quantised.four_bit_floats import MX_BLOCK, NV_BLOCK
from services.model_files.weights.quantised.packed import expect, groups_of, parts_of
from services.model_files.weights.rounded_inputs import InputRounding

_KEY = "input_activations"
# Of scales that are bytes: powers of two.
_POWERS = "torch.uint8"
# How a scale that follows from the input is shared.
_SHARED = {"token": "each row", "group": "inputs of each row"}


class InputActivations:
    """The rounding that a group asks for.

    Raises:
        ConfigurationError: a field has a value that is not served.
    """

    def __init__(self, group: QuantisationFields) -> None:
        self._rounding: InputRounding | None = None
        if not group.get(_KEY):
            return
        fields = group.part(_KEY)
        floats = fields.one_of("type", ("int", "float"), "int") == "float"
        bits = fields.one_of("num_bits", (4, 8) if floats else (8,), 8)
        if floats and fields.get("scale_dtype") == _POWERS:
            self._rounding = _microscaled(fields, bits)
            return
        if bits == 4:
            self._rounding = _nvfp4(fields)
            return
        fields.empty("scale_dtype", "scales that are rounded themselves are not computed for what enters a layer")
        symmetric = fields.one_of("symmetric", (True,) if floats else (True, False), True)
        stored = not fields.one_of("dynamic", (True, False), False)
        size = fields.get("group_size")
        usual = "tensor" if size is None else "channel" if size == -1 else "group"
        strategy = fields.get("strategy") or usual
        if stored and strategy != "tensor":
            raise fields.refusal("strategy", "tensor, where dynamic is false")
        if not stored and strategy not in _SHARED:
            why = "a scale for all rows would let what shares a pass change a token" if strategy == "tensor" else ""
            raise fields.refusal("strategy", " or ".join(_SHARED), why)
        grouped = fields.count("group_size") if strategy == "group" else None
        self._rounding = InputRounding(floats=floats, symmetric=symmetric, size=grouped, stored=stored)

    @property
    def name(self) -> str:
        """What users call it; empty: nothing is rounded."""
        return "" if self._rounding is None else self._rounding.name

    def of_layer(
        self, tensors: Mapping[str, Tensor], layer: str, inputs: int, codes: str
    ) -> tuple[InputRounding | None, dict[str, str]]:
        """The rounding of a layer but for what is stored of it, and the names of that, by part.

        Args:
            codes: the weight's tensor of codes.

        Raises:
            ValueError: a tensor is missing, or does not fit.
        """
        rounding = self._rounding
        if rounding is None:
            return None, {}
        if rounding.size is not None:
            groups_of(inputs, rounding.size, layer)
        if rounding.global_scale is not None:
            parts = parts_of(tensors, {"codes": codes, "input_global_scale": f"{layer}.input_global_scale"})
            expect(tensors, parts["input_global_scale"], ("F32",), [(1,), ()], "one for all that enters the layer")
            return rounding, parts
        if not rounding.stored:
            return rounding, {}
        zero = {} if rounding.symmetric else {"input_zero": f"{layer}.input_zero_point"}
        # Checked with the codes, which an error names.
        parts = parts_of(tensors, {"codes": codes, "input_scale": f"{layer}.input_scale", **zero})
        for part, name in parts.items():
            if part != "codes":
                dtypes = ("F16", "BF16", "F32") if part == "input_scale" else ("I8",)
                expect(tensors, name, dtypes, [(1,), ()], "one for all that enters the layer")
        return rounding, parts


def _microscaled(fields: QuantisationFields, bits: int) -> InputRounding:
    """MXFP4 and MXFP8: scales follow from the input, and are powers of two."""
    fields.one_of("strategy", ("group",))
    size = fields.one_of("group_size", (MX_BLOCK,))
    fields.one_of("dynamic", (True,))
    fields.one_of("symmetric", (True,), True)
    return InputRounding(floats=True, bits=bits, size=size, powers=True)


def _nvfp4(fields: QuantisationFields) -> InputRounding:
    """NVFP4: what a layer's scales are multiplied by is stored with it."""
    fields.one_of("strategy", ("tensor_group",))
    size = fields.one_of("group_size", (NV_BLOCK,))
    fields.one_of("dynamic", ("local",))
    fields.one_of("symmetric", (True,), True)
    # Files from before there was this field mean the same.
    fields.one_of("scale_dtype", ("torch.float8_e4m3fn",), "torch.float8_e4m3fn")
    return InputRounding(floats=True, bits=4, size=size, global_scale=1.0)
