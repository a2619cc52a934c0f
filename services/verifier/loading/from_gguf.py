"""Unpacks a GGUF file into a model folder: configuration, tokeniser, and the weights under transformers' names.

Blocks that the kernels can read are kept; only their rows may be reordered, where GGUF orders them differently from
transformers, and those of experts joined, gates before ups. All other weights become float32. Names and orders come from
transformers' own tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.gguf import is_gguf_arch_supported
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from services.model_files.weights.files import save_blocks
from services.model_files.weights.for_transformers import making_a_model
from services.model_files.weights.stacked_blocks import AnyWeight, StackedBlocks
from services.verifier.loading.complete import mismatched, missing, refuse_unused
from services.verifier.loading.gguf_blocks import READ, in_blocks, weights_by_rules
from services.verifier.loading.refusals import refuse_unsupported

_FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
_UNREAD = "which transformers does not read from GGUF: use the model's safetensors"


def unpack(gguf: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Write the model in ``gguf`` to ``folder``. ``say`` is told which weights cannot be kept as stored.

    Raises:
        ConfigurationError: the model cannot be served, or lacks weights.
        Exception: anything that libraries raise for a damaged file.
    """
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        config = AutoConfig.from_pretrained(**source)
    except OSError as error:
        # transformers' own message speaks of a JSON file.
        raise ValueError("its fields cannot be read: one is no text in UTF-8, or of another type than it should") from error
    refuse_unsupported(config.to_dict(), gguf)
    reader = GGUFReader(gguf)
    architecture = reader.get_field("general.architecture")
    if architecture is None:
        raise ValueError("it names no architecture")
    _refuse_unread_fields(reader, architecture.contents(), config.get_text_config())
    with making_a_model(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # transformers has rules for some architectures, and classes for others.
    find = weights_by_rules if is_gguf_arch_supported(architecture.contents()) else _weights
    weights = find(reader, model, architecture.contents(), say)
    _refuse_others(weights, model, gguf)
    save_blocks(weights, folder)
    # Without fields about the origin of the file.
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    _write_ends(reader, folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def _refuse_others(weights: dict[str, AnyWeight], model: Any, gguf: Path) -> None:
    """Refuse weights that are not the model's, and leave out those that no model has.

    Raises:
        ConfigurationError: a weight is missing, not known, or has another shape.
    """
    parameters = dict(model.named_parameters())
    if lacking := parameters.keys() - weights.keys() - model.all_tied_weights_keys.keys():
        raise missing(model, lacking, gguf)
    others = weights.keys() - model.state_dict().keys()
    refuse_unused(model, others, gguf)
    for name in others:
        del weights[name]
    for name, parameter in parameters.items():
        if name in weights and tuple(weights[name].shape) != tuple(parameter.shape):
            raise mismatched(name, weights[name].shape, parameter.shape, gguf)


def _write_ends(reader: GGUFReader, folder: Path) -> None:
    """Add the tokens that end a turn or a message to the model's end-of-text tokens: transformers reads one alone."""
    found = [reader.get_field(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = [int(field.contents()) for field in found if field is not None]
    file = folder / "generation_config.json"
    content = json.loads(file.read_text()) if file.is_file() else {}
    own = content.get("eos_token_id")
    known = own if isinstance(own, list) else [] if own is None else [own]
    file.write_text(json.dumps({**content, "eos_token_id": list(dict.fromkeys([*known, *ends]))}))


def _refuse_unread_fields(reader: GGUFReader, architecture: str, config: Any) -> None:
    """Refuse a file with fields that transformers ignores although they change the computation.

    Raises:
        ValueError: the file scales positions or has a sliding window, and the configuration made from it does not.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    scaling = reader.get_field(f"{architecture}.rope.scaling.type")
    if scaling is not None and scaling.contents() != "none" and rope.get("rope_type", "default") == "default":
        raise ValueError(f"its positions are scaled (rope.scaling.type: {scaling.contents()}), {_UNREAD}")
    window = reader.get_field(f"{architecture}.attention.sliding_window")
    most = getattr(config, "max_position_embeddings", None) or 0
    if window is not None and 0 < window.contents() < most and getattr(config, "sliding_window", None) != window.contents():
        raise ValueError(f"it has a sliding window (attention.sliding_window: {window.contents()}), {_UNREAD}")


def _weights(reader: GGUFReader, model: Any, architecture: str, say: Callable[[str], None]) -> dict[str, AnyWeight]:
    """All weights by transformers' names."""
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)
    # The processor returns no experts and the like; it enters them here.
    entered: dict[str, Any] = {"tensors": {}}
    experts, taken = _experts(reader, processor, names)
    found: dict[str, AnyWeight] = dict(experts)
    checked: dict[str, bool] = {}
    unpacked: set[str] = set()
    apart = False

    def process(data: np.ndarray[Any, Any], name: str) -> tuple[np.ndarray[Any, Any], str | None]:
        done = processor.process(weights=data, name=name, tensor_key_mapping=names, parsed_parameters=entered)
        return done.weights, done.name

    for tensor in reader.tensors:
        if tensor.name in taken:
            continue
        kind = tensor.tensor_type.name
        floats = tensor.tensor_type in _FLOATS
        if kind in READ and tensor.data.ndim == 2 and tensor.name in names:
            blocks, name = process(tensor.data, tensor.name)
            pattern = re.sub(r"\d+", "N", tensor.name)
            if pattern not in checked:
                # Reordering blocks must give the same as reordering the tensor; this is tested on one layer of each kind.
                whole, _ = process(dequantize(tensor.data, tensor.tensor_type), tensor.name)
                checked[pattern] = np.array_equal(dequantize(blocks, tensor.tensor_type), whole)
            if checked[pattern] and name is not None:
                raw = torch.from_numpy(np.array(blocks))
                found[names[name]] = in_blocks(raw, kind, int(tensor.shape[0]))
                continue
        whole, name = process(dequantize(tensor.data, tensor.tensor_type), tensor.name)
        if name is None:
            # It is in ``entered``.
            if kind in READ:
                apart = True
            elif not floats:
                unpacked.add(kind)
            continue
        if name not in names and not np.array_equal(whole, np.ones_like(whole)):
            raise ValueError(f"it holds {name}, {_UNREAD}")
        if name in names:
            found[names[name]] = torch.from_numpy(np.array(whole))
            if not floats:
                unpacked.add(kind)
    found.update({name: value.clone() for name, value in entered["tensors"].items()})
    if apart:
        say("experts whose gates and ups are of different types become float32")
    if unpacked:
        say(f"weights of the type {', '.join(sorted(unpacked))} become float32: only {', '.join(READ)} are kept as stored")
    return found


def _experts(
    reader: GGUFReader, processor: TensorProcessor, names: Mapping[str, str]
) -> tuple[dict[str, StackedBlocks], set[str]]:
    """Experts whose blocks are kept, by transformers' names, and the tensors that they are made of."""
    parts: dict[str, list[Any]] = {}
    for tensor in reader.tensors:
        if tensor.data.ndim == 3 and (name := names.get(tensor.name.removesuffix(".weight"))) is not None:
            parts.setdefault(name, []).append(tensor)
    found: dict[str, StackedBlocks] = {}
    checked: dict[str, bool] = {}
    for name, tensors in parts.items():
        kind, pattern = tensors[0].tensor_type.name, re.sub(r"\d+", "N", name)
        if kind not in READ or any(tensor.tensor_type.name != kind for tensor in tensors):
            # Gates and ups of two types are one matrix of none.
            continue
        raw = _entered(processor, names, [(tensor.name, tensor.data) for tensor in tensors])
        if raw is None or raw.dim() != 3:
            continue
        blocks = StackedBlocks(tuple(in_blocks(one, kind, int(tensors[0].shape[0])) for one in raw))
        if pattern not in checked:
            # As for other blocks, tested on one layer of each kind.
            numbers = [(tensor.name, dequantize(tensor.data, tensor.tensor_type)) for tensor in tensors]
            whole = _entered(processor, names, numbers)
            checked[pattern] = whole is not None and torch.equal(blocks.float(), whole)
        if checked[pattern]:
            found[name] = blocks
    return found, {tensor.name for name in found for tensor in parts[name]}


def _entered(
    processor: TensorProcessor, names: Mapping[str, str], given: Sequence[tuple[str, np.ndarray[Any, Any]]]
) -> torch.Tensor | None:
    """What transformers makes of experts' tensors, which it joins row by row; None: not one weight."""
    entered: dict[str, Any] = {"tensors": {}}
    for name, data in given:
        processor.process(weights=data, name=name, tensor_key_mapping=names, parsed_parameters=entered)
    made: list[torch.Tensor] = list(entered["tensors"].values())
    return made[0] if len(made) == 1 else None
