"""Reads a block drafter's config.json with the shapes of its tensors; without torch.

Two layouts are read: the authors' (``dflash_config``; SpecForge and JetSpec write it, too) and the speculators library's.
What tensors say counts. A field that contradicts them, or changes the arithmetic in a way that is not implemented, is
refused by its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from services.drafter.heads.blocks.config import BlockConfig, shapes_of
from services.drafter.heads.blocks.part_fields import (
    convolution_fields,
    gru_fields,
    guesses_from_anchor,
    markov_fields,
    selector_fields,
)
from services.drafter.heads.files.head_config import FINAL, HeadConfig, TargetShape
from services.drafter.heads.files.head_fields import (
    HeadFields,
    Shapes,
    refuse_unserved,
    refused_tensor,
    shared_fields,
)
from services.drafter.heads.files.layouts import COMPUTED, DRAFT_OFFSETS, PARALLEL, kind_said, refuse_others, stripped
from services.drafter.heads.files.level_fields import check_tensors
from speculation import limits

# Rows of a block whose config.json does not say: the authors' default, and that of the speculators library.
_AUTHORS_ROWS, _SPECULATORS_ROWS = 16, 8
# Other names of tensors; read, never written.
_ALIASES = (
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
    ("draft_id_to_target_id", DRAFT_OFFSETS),
)
# Only DFlash2 has it.
_SELECTOR = "candidate_selector.hidden_projection.weight"
# Copies of the target's weights that training needs, and drafting does not.
_OF_TRAINING = ("verifier_norm.", "verifier_lm_head.")
# Fields of ``dflash_config`` and of the whole that are honoured with one of these values alone.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "projector_type": (None, "dspark", "domino", "dflash"),
    "draft_shift": (None, False),
    "use_swa": (None, False),
    "attention_sink_bias": (None, False),
    "add_swa_attention_sink_bias": (None, False),
    "attention_mode": (None, "mha", "gqa"),
    "attention_modes": (None,),
    "is_neox_style": (None, True),
    "logit_scale": (None, 1),
}


def is_block(names: Iterable[str]) -> bool:
    """Whether tensors of these names are a block drafter's: it fuses the target's states, and norms them for all layers."""
    held = {public_name(name) for name in names}
    return {"fc.weight", "hidden_norm.weight"} <= held and any(name.startswith("layers.0.self_attn.") for name in held)


def public_name(name: str) -> str:
    """The authors' name of a tensor that a file calls ``name``."""
    short = stripped(name)
    return next((own + short.removeprefix(other) for other, own in _ALIASES if short.startswith(other)), short)


def named(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """``shapes`` by the authors' names, without what drafting does not use."""
    found = {public_name(name): shape for name, shape in shapes.items() if not name.endswith(COMPUTED)}
    return {name: shape for name, shape in found.items() if not name.startswith(_OF_TRAINING)}


def parse_blocks(config: Mapping[str, Any], shapes: Shapes, target: TargetShape, where: str) -> BlockConfig:
    """What a block drafter computes.

    Args:
        shapes: of its tensors, see ``named``.
        where: the checkpoint, for errors.

    Raises:
        ConfigurationError: it cannot draft for the target; names the field or tensor, its value and what is allowed.
    """
    # Some name the mask as other kinds do.
    refuse_others(config, where, "DFlash", "DFlash2", "Domino", "DSpark", *PARALLEL)
    if kind_said(config) == "DFlash2" and _SELECTOR not in shapes:
        raise refused_tensor(where, _SELECTOR, "missing", "DFlash2 needs it")
    fields = HeadFields.of(config, where)
    refuse_unserved(fields, _NEUTRAL)
    layer = _layer(fields, shapes, target)
    rows = _SPECULATORS_ROWS if "speculators_model_type" in fields.fields else _AUTHORS_ROWS
    rows, most = fields.number("block_size", rows), limits.MAX_TREE_NODES
    if not 2 <= rows <= most:
        raise fields.refuse("block_size", rows, f"from 2 to {most}, the most nodes of a tree")
    causal, windows = _attention(fields, layer.num_layers)
    made = BlockConfig(
        layer=layer,
        block_size=rows,
        mask_token_id=_mask_token(fields, target),
        from_anchor=guesses_from_anchor(fields, shapes),
        causal=causal,
        windows=windows,
        embedding_scale=_number(fields, "input_embedding_scale", 1.0),
        logit_scale=_number(fields, "output_multiplier", 1.0),
        softcap=_number(fields, "final_logit_softcapping", 0.0) or None,
        **markov_fields(fields, shapes),
        **selector_fields(fields, shapes),
        **convolution_fields(fields, shapes),
        **gru_fields(fields, shapes),
    )
    check_tensors(shapes, shapes_of(made, shapes), where)
    return made


def _layer(fields: HeadFields, shapes: Shapes, target: TargetShape) -> HeadConfig:
    attention = "layers.0.self_attn."
    hidden = fields.number("hidden_size", shapes["hidden_norm.weight"][0])
    head_dim = fields.number("head_dim", shapes.get(f"{attention}q_norm.weight", (0,))[0] or None)
    heads = fields.number("num_attention_heads", shapes.get(f"{attention}q_proj.weight", (0,))[0] // head_dim)
    layers = _state_layers(fields, target)
    _check_target(fields, target, hidden, shapes, layers)
    return HeadConfig(
        family="dflash",
        hidden_size=hidden,
        head_dim=head_dim,
        state_layers=layers,
        input_norm=True,
        output_norm=True,
        **shared_fields(fields, shapes, target, heads),
    )


def _check_target(fields: HeadFields, target: TargetShape, hidden: int, shapes: Shapes, layers: tuple[int, ...]) -> None:
    """Check that the drafter was made for a target of this shape."""
    sizes = {
        "target_hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
    }
    for name, size in sizes.items():
        if fields.number(name, size) != size:
            raise fields.refuse(name, fields.fields[name], f"{size}, the target's: it is another target's drafter")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if hidden != target.hidden_size and name not in shapes:
            allowed = f"{target.hidden_size}, the target's, since it has no {name} of its own"
            raise fields.refuse("hidden_size", hidden, allowed)
    read, wanted = shapes["fc.weight"][-1], len(layers) * target.hidden_size
    if read != wanted:
        raise fields.refuse("the width of fc.weight", read, f"{wanted}, that of {len(layers)} states of the target")


def _state_layers(fields: HeadFields, target: TargetShape) -> tuple[int, ...]:
    """The layers whose states it reads, as our ids: outputs of layers.

    ``target_layer_ids`` are layers. ``aux_hidden_state_layer_ids`` are indices into transformers' ``hidden_states``, one
    more; the last of these is the state after the final norm. A drafter with the wrong ones accepts next to nothing.
    """
    total = target.num_layers
    found: list[tuple[int, ...]] = []
    for name, before in (
        ("target_layer_ids", 0),
        ("aux_hidden_state_layer_ids", 1),
        ("eagle_aux_hidden_state_layer_ids", 1),
    ):
        given = fields.fields.get(name)
        if given is None:
            continue
        least, most = before, total - 1 + before
        ids = given if isinstance(given, list) else []
        if not ids or any(type(each) is not int or not least <= each <= most for each in ids):
            raise fields.refuse(name, given, f"layers of the target, from {least} to {most}")
        if len(ids) > limits.MAX_LAYERS:
            raise fields.refuse(name, given, f"at most {limits.MAX_LAYERS} layers")
        layers = tuple(FINAL if each == most else each - before for each in ids)
        if found and found[0] != layers:
            raise fields.refuse(name, given, "the layers of target_layer_ids, each plus one")
        found.append(layers)
    if not found:
        raise fields.refuse("target_layer_ids", None, "layers of the target")
    return found[0]


def _mask_token(fields: HeadFields, target: TargetShape) -> int:
    value = fields.fields.get("mask_token_id")
    if type(value) is not int or not 0 <= value < target.vocab_size:
        raise fields.refuse("mask_token_id", value, f"a token of the target, from 0 to {target.vocab_size - 1}")
    return value


def _attention(fields: HeadFields, layers: int) -> tuple[tuple[bool, ...], tuple[int | None, ...]]:
    """By layer: whether it is causal, and its window. Unless a field says so, layers with a window are causal."""
    kinds = fields.fields.get("layer_types") or ["full_attention"] * layers
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise fields.refuse("layer_types", kinds, f"full_attention or sliding_attention for each of {layers} layers")
    sliding = tuple(kind == "sliding_attention" for kind in kinds)
    size = None
    if any(sliding):
        size = fields.number("swa_window_size" if fields.fields.get("swa_window_size") is not None else "sliding_window")
    said = fields.flag("is_causal", "causal", "causal_head")
    if said is not None:
        causal = (said,) * layers
    else:
        causal = (False,) * layers if fields.flag("sliding_window_non_causal") else sliding
    return causal, tuple(size if each else None for each in sliding)


def _number(fields: HeadFields, name: str, default: float) -> float:
    value = fields.fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise fields.refuse(name, value, "a number, 0 or more")
    return float(value)
