"""What a Gemma 4 assistant computes, from its config.json, the target's, and both ones' shapes of tensors; without torch.

Its config.json does not say which of the target's layers its queries look at: of each kind of attention it is the last one
that makes keys and values of its own (transformers 5.24, ``Gemma4TextConfig.kv_sharing_modes``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from services.drafter.heads.files.head_config import ACTIVATION_NAMES, FINAL, TargetShape
from services.drafter.heads.files.head_fields import HeadFields, Shapes, refused_tensor
from services.model_files.folder import text_config

Kind = Literal["sliding_attention", "full_attention"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# Types of rotary positions that Gemma 4's layers have.
ROPES = ("default", "proportional")
_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
_CLASSES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
_TARGETS = ("gemma4_text", "gemma4_unified_text")
# Prefixes of the target's layers, among which towers for images and sounds have layers of the same names.
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
# What stands around the layers: no other model has both.
_AROUND = {"pre_projection.weight", "post_projection.weight"}
CENTROIDS, ORDERING = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
# Parts that transformers leaves unread, since all layers look at the target's.
_UNREAD = ("k_proj", "v_proj", "k_norm", "v_norm")
_USUAL_ROPES: Mapping[str, Mapping[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary positions of one kind of attention.

    Attributes:
        turned: share of the head's width that is turned.
    """

    theta: float
    turned: float = 1.0
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LookedAt:
    """The target's layer whose keys and values all of an assistant's layers of one kind look at.

    Attributes:
        layer: of the target.
        prefix: of the names of its tensors.
        heads, width: of its keys and values.
        own_values: whether values have a matrix of their own; otherwise they are the keys before norm and positions.
        rope: the positions of its keys.
        query_rope: those of the assistant's queries.
    """

    layer: int
    prefix: str
    heads: int
    width: int
    own_values: bool
    rope: Rope
    query_rope: Rope


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistantConfig:
    """An assistant. ``h`` is its hidden size, ``h_t`` the target's.

    Attributes:
        kinds: of its layers.
        looked_at: by kind, in the order of ``KINDS``; those that its layers have.
        window: latest rows that layers of sliding attention see.
        centroids: how many clusters of tokens there are; 0: the output layer scores all tokens.
        active: how many of them are looked through.
        rms_norm_eps: its own; ``target_eps``: of the target's norms.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    kinds: tuple[Kind, ...]
    looked_at: Mapping[Kind, LookedAt]
    window: int
    max_positions: int
    hidden_act: str
    rms_norm_eps: float
    target_eps: float
    own_output: bool = False
    centroids: int = 0
    active: int = 0

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The outputs of the layers before those looked at, of which these make keys and values; and the last state."""
        return (*(each.layer - 1 for each in self.looked_at.values()), FINAL)

    @property
    def row_width(self) -> int:
        """Numbers of a row's keys, of the wider kind."""
        return max(each.heads * each.width for each in self.looked_at.values())


def is_assistant(config: Mapping[str, Any], names: Shapes) -> bool:
    """Whether a folder holds an assistant, by its tensors or by its own word."""
    said = {config.get("model_type"), *(config.get("architectures") or ())}
    return names.keys() >= _AROUND or bool(said & {*_ASSISTANTS, *_CLASSES})


def parse_assistant(
    config: Mapping[str, Any], shapes: Shapes, target: TargetShape, theirs: Shapes, where: str
) -> AssistantConfig:
    """What an assistant computes.

    Args:
        shapes: of all its tensors; ``theirs``: of the target's.
        where: its folder, for errors.

    Raises:
        ConfigurationError: it is another target's, is incomplete or contradicts itself; names the field or tensor, its
            value and what is allowed.
    """
    fields, around = HeadFields.of(text_config(dict(config)), where), HeadFields.of(config, where)
    if (kind := target.config.get("model_type")) not in _TARGETS:
        raise fields.refuse("the target's model_type", kind, f"one of {', '.join(_TARGETS)}: it drafts for Gemma 4")
    for name, holder, size in (
        ("backbone_hidden_size", around, target.hidden_size),
        ("vocab_size", fields, target.vocab_size),
    ):
        if (value := holder.number(name)) != size:
            raise fields.refuse(name, value, f"{size}, the target's: it is another target's")
    if fields.fields.get("use_bidirectional_attention") == "all":
        raise fields.refuse("use_bidirectional_attention", "all", "null or vision: it drafts text from left to right")
    kinds = _kinds(fields, shapes)
    looked_at = {each: _looked_at(each, fields, target, theirs) for each in KINDS if each in kinds}
    centroids, active = _centroids(around, shapes, target.vocab_size)
    found = AssistantConfig(
        hidden_size=fields.number("hidden_size"),
        target_hidden_size=target.hidden_size,
        intermediate_size=fields.number("intermediate_size"),
        num_attention_heads=fields.number("num_attention_heads"),
        vocab_size=target.vocab_size,
        kinds=kinds,
        looked_at=looked_at,
        # transformers' mask lets a query see the row at the window's edge, and its own row is not among them.
        window=fields.number("sliding_window") + 1,
        max_positions=target.max_positions,
        hidden_act=_activation(fields),
        rms_norm_eps=float(fields.fields.get("rms_norm_eps", 1e-6)),
        target_eps=float(target.config.get("rms_norm_eps", 1e-6)),
        own_output=OUTPUT in shapes,
        centroids=centroids,
        active=active,
    )
    _check_shapes(found, shapes, where)
    return found


def is_unread(name: str) -> bool:
    """Whether a tensor of an assistant is of no use to it."""
    return any(f".self_attn.{part}." in name for part in _UNREAD)


def layer_shapes(config: AssistantConfig, kind: Kind) -> dict[str, tuple[int, ...]]:
    """The tensors of one of an assistant's layers, by their names within it."""
    size, inner, width = config.hidden_size, config.intermediate_size, config.looked_at[kind].width
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return {
        **{f"{name}.weight": (size,) for name in norms},
        "self_attn.q_proj.weight": (config.num_attention_heads * width, size),
        "self_attn.q_norm.weight": (width,),
        "self_attn.o_proj.weight": (size, config.num_attention_heads * width),
        "mlp.gate_proj.weight": (inner, size),
        "mlp.up_proj.weight": (inner, size),
        "mlp.down_proj.weight": (size, inner),
        "layer_scalar": (1,),
    }


def _kinds(fields: HeadFields, shapes: Shapes) -> tuple[Kind, ...]:
    numbers = {int(name.split(".")[2]) for name in shapes if name.startswith("model.layers.")}
    count = fields.number("num_hidden_layers")
    if numbers != set(range(count)):
        raise fields.refuse("num_hidden_layers", count, f"{len(numbers)}, the number of layers among its tensors")
    said = fields.fields.get("layer_types")
    if not isinstance(said, list) or len(said) != count or not set(said) <= set(KINDS):
        raise fields.refuse("layer_types", said, f"a list of {count}, each one of {', '.join(KINDS)}")
    if fields.fields.get("num_kv_shared_layers", count) not in (0, count):
        value = fields.fields["num_kv_shared_layers"]
        raise fields.refuse("num_kv_shared_layers", value, f"{count}: all its layers look at the target's keys")
    return tuple(said)


def _looked_at(kind: Kind, fields: HeadFields, target: TargetShape, theirs: Shapes) -> LookedAt:
    layer = _last_layer(kind, fields, target)
    if layer == 0:
        why = "1 at least: the state before layer 0 is no layer's, so that drafters do not get it"
        raise fields.refuse(f"the target's layer that makes the keys of {kind}", 0, why)
    names = (f"{prefix}layers.{layer}." for prefix in _PREFIXES)
    prefix = next((name for name in names if f"{name}self_attn.k_proj.weight" in theirs), None)
    if prefix is None:
        raise fields.refuse(
            f"layers.{layer}.self_attn.k_proj.weight",
            "missing",
            "among the target's weights: its queries look at these keys",
        )
    for name in ("k_proj.bias", "v_proj.bias"):
        if f"{prefix}self_attn.{name}" in theirs:
            raise fields.refuse(f"the target's {prefix}self_attn.{name}", "there", "absent: it is not implemented")
    (width,), (rows, _) = (theirs[f"{prefix}self_attn.{name}.weight"] for name in ("k_norm", "k_proj"))
    heads, asking = rows // width, fields.number("num_attention_heads")
    if asking % heads:
        raise fields.refuse("num_attention_heads", asking, f"a multiple of {heads}, the target's heads of keys of {kind}")
    return LookedAt(
        layer=layer,
        prefix=prefix,
        heads=heads,
        width=width,
        own_values=f"{prefix}self_attn.v_proj.weight" in theirs,
        rope=_rope(kind, HeadFields(target.config, fields.where), "the target's "),
        query_rope=_rope(kind, fields),
    )


def _last_layer(kind: Kind, fields: HeadFields, target: TargetShape) -> int:
    """The last of the target's layers of a kind that makes keys of its own."""
    total, shared = target.num_layers, int(target.config.get("num_kv_shared_layers") or 0)
    kinds = list(
        target.config.get("layer_types") or ("full_attention" if not (at + 1) % 6 else KINDS[0] for at in range(total))
    )
    own = [at for at, each in enumerate(kinds[: total - shared]) if each == kind]
    if not own:
        allowed = f"with {kind} before its last {shared}: its queries look at keys of such a layer"
        raise fields.refuse("the target's layer_types", kinds, allowed)
    return own[-1]


def _rope(kind: Kind, fields: HeadFields, whose: str = "") -> Rope:
    ropes = fields.fields.get("rope_parameters")
    said = (ropes.get(kind) if isinstance(ropes, Mapping) else None) or _USUAL_ROPES[kind]
    name = f"{whose}rope_parameters of {kind}"
    if (rope_type := said.get("rope_type", "default")) not in ROPES:
        raise fields.refuse(name, rope_type, f"one of {', '.join(ROPES)}")
    theta = said.get("rope_theta")
    if not isinstance(theta, int | float) or not math.isfinite(theta) or theta <= 0:
        raise fields.refuse(f"rope_theta in {name}", theta, "a positive number")
    # The default type turns the whole width, whatever else stands there.
    if rope_type == "default":
        return Rope(theta=float(theta))
    return Rope(
        theta=float(theta),
        turned=float(said.get("partial_rotary_factor", 1.0)),
        factor=float(said.get("factor") or 1.0),
    )


def _activation(fields: HeadFields) -> str:
    said = str(fields.fields.get("hidden_activation") or "gelu_pytorch_tanh")
    if said not in ACTIVATION_NAMES:
        raise fields.refuse("hidden_activation", said, f"one of {', '.join(ACTIVATION_NAMES)}")
    return said


def _centroids(fields: HeadFields, shapes: Shapes, vocab_size: int) -> tuple[int, int]:
    """How many clusters of tokens there are, and how many of them are looked through; 0: none."""
    if not fields.shown_by(CENTROIDS, shapes, "use_ordered_embeddings"):
        return 0, 0
    held, count = shapes[CENTROIDS][0], fields.number("num_centroids", 2048)
    if held != count:
        raise fields.refuse("num_centroids", count, f"{held}, the rows of {CENTROIDS}")
    if vocab_size % count:
        raise fields.refuse("num_centroids", count, f"a divisor of {vocab_size}, the vocabulary: clusters are of one size")
    active = fields.number("centroid_intermediate_top_k", 32)
    if active > count:
        raise fields.refuse("centroid_intermediate_top_k", active, f"{count} at most, the number of centroids")
    return count, active


def _check_shapes(config: AssistantConfig, shapes: Shapes, where: str) -> None:
    """Check that all tensors are there, and no others."""
    size, target = config.hidden_size, config.target_hidden_size
    wanted: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (size, 2 * target),
        "post_projection.weight": (target, size),
        EMBEDDING: (config.vocab_size, size),
        "model.norm.weight": (size,),
    }
    if config.own_output:
        wanted[OUTPUT] = (config.vocab_size, size)
    if config.centroids:
        wanted |= {CENTROIDS: (config.centroids, size), ORDERING: (config.vocab_size,)}
    for number, kind in enumerate(config.kinds):
        wanted |= {f"model.layers.{number}.{name}": shape for name, shape in layer_shapes(config, kind).items()}
    for name, shape in wanted.items():
        if name not in shapes:
            raise refused_tensor(where, name, "missing", "an assistant needs it")
        if shapes[name] != shape:
            raise refused_tensor(where, name, list(shapes[name]), allowed=f"{list(shape)}, by config.json and the target")
    for name in shapes:
        if name not in wanted and not is_unread(name):
            raise refused_tensor(where, name, "unknown", allowed="one of an assistant")
