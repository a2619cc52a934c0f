"""What MTP layers compute, from their config.json and the shapes of their tensors; read without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.drafter.heads.files.head_config import FINAL, FIXED, TargetShape, rope_of
from services.drafter.heads.files.head_fields import HeadFields, Shapes, refused_tensor
from services.drafter.heads.files.layouts import COMPUTED
from services.model_files.folder import text_config
from services.model_files.mtp_layers import MtpLayerTensors, MtpTensors, find_mtp
from services.model_files.weights.headers import read_shapes
from speculation.errors import ConfigurationError, spelled

# Where config.json says how many MTP layers there are.
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers", "num_mtp_layers")
# Fields that change the arithmetic in a way that is not implemented, unless they have one of these values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "mtp_use_dedicated_embeddings": (None, False),
    "chain_hidden_post_norm": (None,),
    "mtp_layer_types": (None,),
    "mtp_mlp_layer_types": (None,),
}
# The target's fields that go by layer, which a folder of MTP layers alone may cut.
_BY_LAYER = ("num_hidden_layers", "layer_types", "mlp_layer_types")
# Where the decoder layer's tensors are, by canonical name.
BLOCK = "block."
# What checkpoints call attention sinks.
_SINKS = (".attention_sink_bias", ".sinks")
# Tensors that are copies of the target's.
SHARED = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpConfig:
    """MTP layers. ``h`` is the target's hidden size.

    Attributes:
        layer: config.json of the model whose decoder layers they have.
        num_layers: how many there are. One alone guesses further tokens by its own output; of several, layer k guesses the
            token k + 1 ahead.
        mtp_hidden_states_first: the matrix reads [state ; embedding], not [embedding ; state].
        output_norm: a norm before the output layer.
        norm_output: the state fed back, or handed to the next layer, is the one after this norm.
        chain_mtp_hidden_states: of several layers, each reads what the one before it made of the same position; otherwise
            each reads the target's state of it.
    """

    hidden_size: int
    vocab_size: int
    max_positions: int
    layer: Mapping[str, Any]
    num_layers: int = 1
    mtp_hidden_states_first: bool = False
    output_norm: bool = True
    norm_output: bool = True
    chain_mtp_hidden_states: bool = True

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Engines give it the input of the target's output layer."""
        return (FINAL,)


def is_mtp(folder: Path, config: Mapping[str, Any], shapes: Shapes, target: Path | None) -> bool:
    """Whether a folder drafts by its MTP layer.

    The target's own folder does, and one with nothing else; another whole model is a draft model.
    """
    found = find_mtp(shapes)
    if found is None:
        return config.get("speculators_model_type") == "mtp"
    others = [name for name in shapes if name not in found.every and ".layers." in f".{name}"]
    return not others or (target is not None and folder.resolve() == target.resolve())


def mtp_tensors(shapes: Shapes, where: str) -> MtpTensors:
    """The MTP layers among tensors of the checkpoint at ``where``.

    Raises:
        ConfigurationError: there are none of a known layout.
    """
    if (found := find_mtp(shapes)) is not None:
        return found
    raise ConfigurationError(
        place=f"cannot load the MTP layer at {where}",
        field="its tensors",
        value="none of an MTP layer",
        verb="are",
        allowed="named as by DeepSeek (eh_proj), MiMo (mtp_layers, mtp.layers), Qwen (mtp.fc) or ERNIE (mtp_linear_proj)",
    )


def mtp_numbers(found: MtpTensors, shapes: Shapes) -> int:
    """How many numbers the layers' own tensors hold."""
    own = {public for layer in found.layers for name, public in layer.names.items() if name not in SHARED}
    return sum(math.prod(shapes[public]) for public in own)


def mtp_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors in a folder that are no tables computed from the configuration."""
    return {name: shape for name, shape in read_shapes(folder).items() if not name.endswith(COMPUTED)}


def parse_mtp(config: Mapping[str, Any], shapes: Shapes, target: TargetShape, where: str) -> tuple[MtpConfig, MtpTensors]:
    """What MTP layers compute, and where their tensors are.

    Args:
        config: config.json of its folder, which may be the target's.
        shapes: of all tensors in the folder.
        where: the folder, for errors.

    Raises:
        ConfigurationError: it has no such layer, or one that cannot be computed or is another target's; names the field or
            tensor, its value and what is allowed.
    """
    own = config.get("transformer_layer_config")
    own = own if isinstance(own, dict) else text_config(dict(config))
    fields = HeadFields.of({**own, **config}, where)
    found = mtp_tensors(shapes, where)
    _check_fields(fields, found, target)
    for each in found.layers:
        _check_joint(each, shapes, target.hidden_size, where)
    layer = dict(own)
    if own.get("model_type", target.config.get("model_type")) == target.config.get("model_type"):
        by_layer = {name: target.config[name] for name in _BY_LAYER if name in target.config}
        layer = {**target.config, **own, **by_layer}
    if (kind := rope_of(layer)["rope_type"]) not in FIXED:
        raise fields.refuse("rope_type", kind, f"one of {', '.join(FIXED)}")
    # Quantised weights are read as the numbers that they stand for.
    layer.pop("quantization_config", None)
    made = MtpConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        max_positions=target.max_positions,
        layer=layer,
        num_layers=len(found.layers),
        mtp_hidden_states_first=_state_first(fields, found),
        output_norm=found.layout.normed,
        norm_output=found.layout.normed and fields.flag("norm_output") is not False,
        chain_mtp_hidden_states=_chained(fields, found),
    )
    return made, found


def _check_fields(fields: HeadFields, found: MtpTensors, target: TargetShape) -> None:
    numbers = [each.number for each in found.layers]
    for name in _COUNTS:
        if fields.fields.get(name) is not None and fields.number(name) != len(numbers):
            raise fields.refuse(name, fields.fields[name], f"{len(numbers)}, the number of MTP layers among the tensors")
    if numbers[-1] - numbers[0] >= len(numbers):
        raise fields.refuse("the numbering of its MTP layers", numbers, "without a gap")
    if len(numbers) > 1 and found.layout.chained is None:
        why = f"1: what several layers of layout {found.layout.name} read is not known"
        raise fields.refuse("num_nextn_predict_layers", len(numbers), why)
    for name, allowed in _NEUTRAL.items():
        if (value := fields.fields.get(name)) not in allowed:
            raise fields.refuse(name, value, f"{spelled(allowed[-1])}: nothing else is implemented")
    for name, size in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if fields.number(name, size) != size:
            raise fields.refuse(name, fields.fields[name], f"{size}, the target's: it is another target's")


def _check_joint(found: MtpLayerTensors, shapes: Shapes, size: int, where: str) -> None:
    """Check all tensors but those of the decoder layer."""
    wanted: dict[str, tuple[int, ...]] = {
        "embed_norm.weight": (size,),
        "state_norm.weight": (size,),
        "fc.weight": (size, 2 * size),
    }
    if found.layout.normed:
        wanted["norm.weight"] = (size,)
    for name, shape in wanted.items():
        if name not in found.names:
            raise refused_tensor(where, found.public(name), "missing")
        if shapes[found.names[name]] != shape:
            raise refused_tensor(
                where, found.names[name], list(shapes[found.names[name]]), allowed=f"{list(shape)}, by the target"
            )
    for name, public in found.names.items():
        if name.endswith(_SINKS):
            raise refused_tensor(where, public, "an attention sink", allowed="absent: attention sinks are not implemented")
        if not name.startswith(BLOCK) and name not in (*wanted, *SHARED):
            raise refused_tensor(where, public, "unknown", allowed=f"one of layout {found.layout.name}")


def _state_first(fields: HeadFields, found: MtpTensors) -> bool:
    said = fields.flag("mtp_hidden_states_first")
    # The speculators library has MiMo's names, and the other order.
    usual = found.layout.state_first and "speculators_model_type" not in fields.fields
    return usual if said is None else said


def _chained(fields: HeadFields, found: MtpTensors) -> bool:
    said = fields.flag("chain_mtp_hidden_states")
    return found.layout.chained is not False if said is None else said
