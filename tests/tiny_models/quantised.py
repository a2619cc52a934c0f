"""Quantised checkpoints, made of the tiny model's weights, each with the numbers that its format's own package makes of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.tiny_models.tiny import make_tiny_model

# Ends of the names of what is quantised, w1 to w3 being those of a mixture's experts.
QUANTISED = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
Weights = dict[str, torch.Tensor]
# Stored tensors by what follows the layer's name, and the numbers that they stand for.
Made = tuple[Weights, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantised:
    """A way to store linear layers.

    Attributes:
        config: its ``quantization_config``.
        make: quantises a matrix in float32, [outputs, inputs].
    """

    config: Mapping[str, Any]
    make: Callable[[torch.Tensor], Made]


def make_float_model(folder: Path, **overrides: object) -> Path:
    """A tiny model whose matrices are no multiples of 128, but of 32."""
    return make_tiny_model(folder, **{"hidden_size": 192, "intermediate_size": 160, **overrides})


def quantise(model: Path, folder: Path, how: Quantised) -> tuple[Path, Path]:
    """Store ``model`` quantised, and beside it the float model that this stands for; returns both folders."""
    weights = load_file(model / "model.safetensors")
    stored: Weights = {}
    plain: Weights = {}
    for name, weight in weights.items():
        if not name.endswith(QUANTISED):
            stored[name] = plain[name] = weight
            continue
        made, plain[name] = how.make(weight)
        stored |= {f"{name.removesuffix('.weight')}.{part}": tensor.contiguous() for part, tensor in made.items()}
    for kind, tensors in (("quantised", stored), ("plain", plain)):
        shutil.copytree(model, folder / kind)
        save_file(tensors, folder / kind / "model.safetensors", metadata={"format": "pt"})
    configure(folder / "quantised", quantization_config=dict(how.config))
    return folder / "quantised", folder / "plain"


def configure(folder: Path, **fields: object) -> None:
    """Change fields of ``config.json``."""
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | fields))


def fp8_blocks(weight: torch.Tensor, size: int, scales: torch.dtype = torch.float32) -> Made:
    """As DeepSeek's ``weight_dequant`` reads it."""
    rows, columns = weight.shape
    codes, scale = torch.empty_like(weight), torch.empty(-(-rows // size), -(-columns // size))
    numbers = torch.empty_like(weight)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            at = (slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size))
            scale[row, column] = (weight[at].abs().max() / 448).to(scales)
            codes[at] = (weight[at] / scale[row, column]).to(torch.float8_e4m3fn).float()
            numbers[at] = codes[at] * scale[row, column]
    made = {"weight": codes.to(torch.float8_e4m3fn), "weight_scale_inv": scale.to(scales)}
    if rows % size == 0 and columns % size == 0:
        theirs = Fp8Dequantize(None)._dequantize_one(made["weight"], made["weight_scale_inv"], torch.float32)
        assert torch.equal(theirs, numbers)
    return made, numbers


def fp8_rows(weight: torch.Tensor, scales: torch.dtype = torch.bfloat16) -> Made:
    """A scale for each output."""
    scale = (weight.abs().amax(1, keepdim=True) / 448).to(scales)
    codes = (weight / scale.float()).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def fp8_whole(weight: torch.Tensor) -> Made:
    """A scale for the whole weight."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def compressed(
    scales: torch.dtype = torch.float32, entering: Mapping[str, object] | None = None, **weights: object
) -> Quantised:
    """By the package compressed-tensors: its configuration, its quantisation, its packing, its numbers.

    Args:
        entering: how what enters a layer is rounded.
    """
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),  # type: ignore[arg-type]
        input_activations=None if entering is None else QuantizationArgs(**entering),  # type: ignore[arg-type]
    )
    form = infer_module_format(torch.nn.Linear, scheme)
    compressor = BaseCompressor.get_value_from_registry(form.value)
    group = scheme.model_copy(update={"format": form.value}).model_dump(mode="json")
    config = {"quant_method": "compressed-tensors", "format": form.value, "config_groups": {"group_0": group}}
    return Quantised(
        config={**config, "ignore": ["lm_head"]}, make=lambda weight: _compress(weight.to(scales), scheme, compressor)
    )


def _with(how: Quantised, **stored: float) -> Quantised:
    """With further tensors of one number for each layer; zero points are whole numbers."""
    tensors = {
        name: torch.tensor([value], dtype=torch.int8 if name.endswith("point") else torch.float32)
        for name, value in stored.items()
    }

    def make(weight: torch.Tensor) -> Made:
        made, numbers = how.make(weight)
        return {**made, **{name: tensor.clone() for name, tensor in tensors.items()}}, numbers

    return Quantised(config=how.config, make=make)


def _compress(weight: torch.Tensor, scheme: QuantizationScheme, compressor: type[BaseCompressor]) -> Made:
    args = scheme.weights
    assert args is not None
    blocks = weight.unflatten(-1, (-1, args.group_size or weight.shape[1]))
    least, most = (
        (blocks.amin(-1), blocks.amax(-1)) if args.strategy != "tensor" else (weight.min()[None], weight.max()[None])
    )
    whole = None
    if args.strategy == "tensor_group":
        whole = generate_gparam(weight.min(), weight.max())
    if args.strategy == "block":
        rows, columns = args.block_structure or (1, 1)
        most = weight.unflatten(0, (-1, rows)).unflatten(-1, (-1, columns)).abs().amax((1, 3))
        least = -most
    scale, zero = calculate_qparams(least, most, args, global_scale=whole)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    state |= {} if whole is None else {"weight_global_scale": whole.view(1)}
    stored = {name: torch.as_tensor(tensor) for name, tensor in compressor.compress(state, scheme).items()}
    if args.symmetric:
        stored.pop("weight_zero_point", None)
    theirs = compressor.decompress(dict(stored), scheme)["weight"]
    # The package rounds to the scales' type, which float32 keeps from it.
    if whole is None:
        numbers = compressor.decompress({**stored, "weight_scale": _widened(stored["weight_scale"])}, scheme)[
            "weight"
        ].float()
    else:
        codes = unpack_fp4_from_uint8(stored["weight_packed"], *weight.shape, dtype=torch.float32)
        numbers = dequantize(
            codes, stored["weight_scale"].float(), args=args, dtype=torch.float32, global_scale=whole.view(1)
        )
    assert torch.equal(numbers.to(theirs.dtype), theirs)
    return stored, numbers


def _widened(scales: torch.Tensor) -> torch.Tensor:
    return scales.float() if scales.is_floating_point() else scales


def _codes(weight: torch.Tensor, size: int, bits: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [outputs, groups, size], zero points and float16 scales [outputs, groups]."""
    groups, most = weight.unflatten(1, (-1, size)), (1 << bits) - 1
    if symmetric:
        scales = (groups.abs().amax(-1) * 2 / most).half()
        zeros = torch.full_like(scales, (most + 1) // 2, dtype=torch.int64)
    else:
        low = groups.amin(-1).clamp(max=0)
        scales = ((groups.amax(-1).clamp(min=0) - low) / most).half()
        zeros = (-low / scales.float()).round().long().clamp(0, most)
    codes = ((groups / scales.float()[..., None]).round().long() + zeros[..., None]).clamp(0, most)
    return codes, zeros, scales


def _words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of whole numbers as rows of words, the lowest bits first, as one string of bits for each row."""
    text = (values.numpy()[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(len(values), -1)
    packed = np.packbits(text[:, : text.shape[1] // 32 * 32], axis=1, bitorder="little")
    return torch.from_numpy(packed.view(np.int32))


def awq(weight: torch.Tensor, size: int = 32) -> Made:
    """Read back by compressed-tensors' own reader of AutoAWQ's files."""
    codes, zeros, scales = _codes(weight, size, 4, symmetric=False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    words = [_words(part.T.unflatten(1, (-1, 8))[..., order].flatten(1), 4) for part in (codes.flatten(1), zeros)]
    made = {"qweight": words[0], "qzeros": words[1], "scales": scales.T}
    read = AutoAWQConverter(bits=4, group_size=size, zero_point=True, version="gemm", ignore=[], targets=[])
    theirs, scale, zero = read._convert_gemm_module(words[0], scales.T.float(), words[1])
    assert zero is not None
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=size, symmetric=False)
    return made, dequantize(theirs, scale, zero, args)


def gptq(
    weight: torch.Tensor, bits: int = 4, size: int = 32, symmetric: bool = True, ordered: bool = False, less: int = 1
) -> Made:
    """As AutoGPTQ packs it.

    Args:
        ordered: whether the inputs are quantised in another order than they have.
        less: what zero points are stored less.
    """
    inputs = weight.shape[1]
    size = inputs if size < 0 else size
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(3)) if ordered else torch.arange(inputs)
    codes, zeros, scales = _codes(weight[:, order], size, bits, symmetric)
    numbers, back = ((codes - zeros[..., None]).float() * scales.float()[..., None]).flatten(1), order.argsort()
    made = {
        "qweight": _words(codes.flatten(1)[:, back], bits).T,
        "qzeros": _words(((zeros - less) % (1 << bits)).T, bits),
        "scales": scales.T,
        "g_idx": (back // size).int(),
    }
    return made, numbers[:, back]


def _gptq(make: Callable[..., Made] = gptq, **fields: object) -> Quantised:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, **fields}
    return Quantised(config=config, make=make)


def bnb_int8(weight: torch.Tensor) -> Made:
    """Rows in 127 steps of their largest number."""
    scales = weight.abs().amax(1)
    codes = (weight * (127 / scales[:, None])).round().to(torch.int8)
    made = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return made, bnb.int8_vectorwise_dequant(codes, scales)


def bnb_four(weight: torch.Tensor, kind: str, nested: bool = False) -> Made:
    """By bitsandbytes itself, in blocks that end with the rows: its kernel for CPUs begins one with each row."""
    codes, state = bnb.quantize_4bit(weight, quant_type=kind, compress_statistics=nested, blocksize=32)
    numbers = bnb.dequantize_4bit(codes, state)
    return {"weight": codes, **{f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}}, numbers


def _bnb(kind: str, nested: bool) -> Quantised:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Quantised(
        config={**config, "bnb_4bit_use_double_quant": nested}, make=partial(bnb_four, kind=kind, nested=nested)
    )


def hqq(weight: torch.Tensor, bits: int, axis: int, size: int = 32, scales: torch.dtype = torch.float16) -> Made:
    """As hqq packs it, without its fine-tuning; tests/unit/model_files/test_hqq.py has what the package itself makes."""
    groups, most = weight.reshape((-1, size) if axis else (size, -1)), (1 << bits) - 1
    low, high = groups.amin(axis, keepdim=True), groups.amax(axis, keepdim=True)
    scale = ((high - low) / most).to(scales)
    zero = (-low / scale.float()).to(scales)
    codes = (groups / scale.float() + zero.float()).round().clamp(0, most)
    each = 10 if bits == 3 else 8 // bits
    rows = torch.nn.functional.pad(codes.int(), (0, 0, 0, -len(codes) % each))
    words = torch.zeros(len(rows) // each, rows.shape[1], dtype=torch.int32)
    for part in rows.chunk(each):
        words = (words << bits) | part
    said = {"shape": torch.tensor(weight.shape), "packing": _letters("3bit_32" if bits == 3 else f"{bits}bit_u8")}
    said |= {name: torch.tensor(value, dtype=torch.int32) for name, value in (("group_size", size), ("axis", axis))}
    said |= {name: torch.tensor(value, dtype=torch.uint8) for name, value in (("view_as_float", 0), ("quant_zero", 0))}
    made = {"W_q": words if bits == 3 else words.byte(), "scale": scale, "zero": zero, **said}
    return made, ((codes - zero.float()) * scale.float()).reshape(weight.shape)


def _letters(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _hqq(bits: int, axis: int, **how: Any) -> Quantised:
    """Its configuration says less than the tensors do."""
    params = {"nbits": bits, "group_size": 32, "axis": axis, "view_as_float": False}
    config = {"quant_method": "hqq", "quant_config": {"weight_quant_params": params}, "skip_modules": ["lm_head"]}
    return Quantised(config=config, make=partial(hqq, bits=bits, axis=axis, **how))


FP8 = {"num_bits": 8, "type": "float"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
# As MXFP4 and MXFP8: a power of two for each 32 numbers.
MX: Mapping[str, Any] = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
FORMS: Mapping[str, Quantised] = {
    "fp8_blocks_of_128": Quantised(
        config={"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        make=lambda weight: fp8_blocks(weight, 128),
    ),
    "fp8_blocks_of_32": Quantised(
        config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]},
        make=lambda weight: fp8_blocks(weight, 32, torch.bfloat16),
    ),
    "fp8_rows": Quantised(config={"quant_method": "fp8"}, make=fp8_rows),
    "fp8_whole": Quantised(config={"quant_method": "fp8", "activation_scheme": "dynamic"}, make=fp8_whole),
    "compressed_w4_groups": compressed(num_bits=4, strategy="group", group_size=32),
    "compressed_w4_zeros": compressed(torch.bfloat16, num_bits=4, strategy="group", group_size=32, symmetric=False),
    "compressed_w4_halves": compressed(torch.bfloat16, num_bits=4, strategy="group", group_size=32),
    "compressed_w8_halves": compressed(torch.bfloat16, num_bits=8, strategy="channel"),
    "compressed_w8_zeros_halves": compressed(torch.bfloat16, num_bits=8, strategy="channel", symmetric=False),
    "compressed_w3": compressed(num_bits=3, strategy="channel"),
    "compressed_w8": compressed(num_bits=8, strategy="channel"),
    "compressed_fp8": compressed(**FP8, strategy="channel"),
    "compressed_fp8_whole": compressed(**FP8, strategy="tensor"),
    "compressed_fp8_blocks": compressed(**FP8, strategy="block", block_structure=[32, 32]),
    "compressed_w4_groups_of_16": compressed(torch.bfloat16, num_bits=4, strategy="group", group_size=16),
    "compressed_mxfp4": compressed(num_bits=4, **MX),
    "compressed_mxfp8": compressed(num_bits=8, **MX),
    "compressed_nvfp4": compressed(**NVFP4),
    "awq": Quantised(
        config={"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, make=awq
    ),
    "gptq": _gptq(),
    "gptq_ordered": _gptq(partial(gptq, ordered=True, symmetric=False), desc_act=True, sym=False),
    "gptq_groups_of_16": _gptq(partial(gptq, size=16, symmetric=False), group_size=16, sym=False),
    "gptq_v2": _gptq(partial(gptq, less=0, symmetric=False), checkpoint_format="gptq_v2", sym=False),
    "gptq_3_bits": _gptq(partial(gptq, bits=3, size=-1, symmetric=False), bits=3, group_size=-1),
    "gptq_8_bits": _gptq(partial(gptq, bits=8), bits=8),
    "gptq_8_bits_zeros": _gptq(partial(gptq, bits=8, symmetric=False), bits=8, sym=False),
    "hqq_8_bits": _hqq(8, 1, scales=torch.float32),
    "hqq_8_bits_halves": _hqq(8, 1),
    "hqq_8_bits_below": _hqq(8, 0),
    "hqq_4_bits": _hqq(4, 1),
    "hqq_4_bits_below": _hqq(4, 0, scales=torch.bfloat16),
    "hqq_3_bits": _hqq(3, 1),
    "hqq_2_bits_below": _hqq(2, 0),
    "bnb_int8": Quantised(config={"quant_method": "bitsandbytes", "load_in_8bit": True}, make=bnb_int8),
    "bnb_nf4": _bnb("nf4", nested=False),
    "bnb_nf4_nested": _bnb("nf4", nested=True),
    "bnb_fp4": _bnb("fp4", nested=False),
}
# Layers that also round what enters them.
EACH_ROW = {"num_bits": 8, "dynamic": True, "strategy": "token"}
ZEROS_TOO = {**EACH_ROW, "symmetric": False}
ROUNDED: Mapping[str, Quantised] = {
    "w8a8": compressed(num_bits=8, strategy="channel", entering=EACH_ROW),
    "w8a8_halves": compressed(torch.bfloat16, num_bits=8, strategy="channel", entering=EACH_ROW),
    "w8a8_zeros": compressed(num_bits=8, strategy="channel", entering=ZEROS_TOO),
    "w8a8_zeros_halves": compressed(torch.bfloat16, num_bits=8, strategy="channel", symmetric=False, entering=ZEROS_TOO),
    "w8a8_stored": _with(compressed(num_bits=8, strategy="channel", entering={"num_bits": 8}), input_scale=0.03),
    "w8a8_stored_zeros": _with(
        compressed(num_bits=8, strategy="channel", entering={"num_bits": 8, "symmetric": False}),
        input_scale=0.03, input_zero_point=-9,
    ),
    "w4a8": compressed(num_bits=4, strategy="group", group_size=32, entering=EACH_ROW),
    "fp8_dynamic": compressed(**FP8, strategy="channel", entering={**EACH_ROW, **FP8}),
    "fp8_stored": _with(compressed(**FP8, strategy="tensor", entering=FP8), input_scale=0.01),
    "fp8_static": _with(
        Quantised(config={"quant_method": "fp8", "activation_scheme": "static"}, make=fp8_whole), activation_scale=0.02
    ),
    "fp8_block": compressed(
        **FP8, strategy="block", block_structure=[32, 32],
        entering={**FP8, "dynamic": True, "strategy": "group", "group_size": 32},
    ),
    "w4afp8": compressed(num_bits=4, strategy="group", group_size=32, entering={**EACH_ROW, **FP8}),
    "mxfp4": compressed(num_bits=4, **MX, entering={**MX, "num_bits": 4, "dynamic": True}),
    "mxfp8": compressed(num_bits=8, **MX, entering={**MX, "num_bits": 8, "dynamic": True}),
    "nvfp4": _with(compressed(**NVFP4, entering={**NVFP4, "dynamic": "local"}), input_global_scale=500.0),
}  # fmt: skip


Make = Callable[[str], tuple[Path, Path]]


def each_once(float_model: Path, folders: pytest.TempPathFactory) -> Make:
    """Gives the model in a form, and the float model that this stands for: folders for all tests that change nothing in them."""
    return cache(lambda form: quantise(float_model, folders.mktemp("form"), FORMS[form]))
