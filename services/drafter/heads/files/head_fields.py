"""Reads a head's ``config.json``, in all public forms, with the tensors' shapes.

What the tensors say counts. A field that contradicts them, or changes the arithmetic in a way that is not implemented, is
refused by its name.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from services.drafter.heads.files.head_config import ACTIVATION_NAMES, FINAL, FIXED, HeadConfig, TargetShape, rope_of
from services.drafter.heads.files.layouts import DRAFT_IDS, DRAFT_OFFSETS, HeadLayout
from speculation.errors import ConfigurationError, spelled

Shapes = Mapping[str, tuple[int, ...]]

# Fields that make drafting lossy unless they have this value.
_LOSSLESS = {"accept_tolerance": 0, "verifier_accept_k": 1, "accept_lenience": 1, "lenience": 1}
# Fields that change the arithmetic in a way that is not implemented, unless they have one of these values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1),
    "residual_multiplier": (None, 1),
    "embedding_multiplier": (None, 1),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
}
# Models whose decoder layer is Llama's, but for biases and norms on queries and keys, which tensors show.
_MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "eagle", "dspark", "speculators", "speculator_model")


def refused_tensor(
    where: str, name: str, value: object, why: str = "", *, verb: str = "is", allowed: str = ""
) -> ConfigurationError:
    """The error for one tensor of a checkpoint."""
    place, field = f"cannot load the head at {where}", f"the tensor {name}"
    return ConfigurationError(why, place=place, field=field, verb=verb, value=value, allowed=allowed)


@dataclass(frozen=True, slots=True)
class HeadFields:
    """The fields of a checkpoint's config.json, the nested ones of its layer included."""

    fields: Mapping[str, Any]
    where: str

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> HeadFields:
        """The fields; ``where`` names the checkpoint in errors. Those of its layer may be nested.

        Raises:
            ConfigurationError: a field, at any depth, asks for a rule that changes the target's answers.
        """
        keys = ("transformer_layer_config", "model", "eagle_config", "dflash_config", "dspark_config")
        nested = [part for key in keys if isinstance(part := config.get(key), dict)]
        fields = cls(ChainMap(dict(config), *nested), where)
        for name, value in _everywhere(config):
            if name in _LOSSLESS and value is not None and value != _LOSSLESS[name]:
                raise fields.refuse(name, value, f"{_LOSSLESS[name]}: anything else changes the target's answers")
        return fields

    def refuse(self, field: str, value: object, allowed: str) -> ConfigurationError:
        """The error for one field."""
        shown = spelled(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        return ConfigurationError(place=f"cannot load the head at {self.where}", field=field, value=shown, allowed=allowed)

    def number(self, name: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self.fields.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise self.refuse(name, value, "a positive whole number")
        return value

    def flag(self, *names: str) -> bool | None:
        """The first of these flags that is given; None if none is."""
        for name in names:
            value = self.fields.get(name)
            if value is not None:
                if type(value) is not bool:
                    raise self.refuse(name, value, "true or false")
                return value
        return None

    def shown_by(self, tensor: str, shapes: Shapes, *names: str) -> bool:
        """Whether ``tensor`` is there; a flag of these names that says otherwise is refused."""
        there, said = tensor in shapes, self.flag(*names)
        if said is not None and said != there:
            name = next(each for each in names if self.fields.get(each) is not None)
            shown, place = tensor.removeprefix("connector."), "among" if there else "not among"
            allowed = f"{str(there).lower()}: {shown} is {place} the tensors"
            raise self.refuse(name, str(said).lower(), allowed)
        return there


def parse(
    config: Mapping[str, Any],
    layout: HeadLayout,
    shapes: Shapes,
    target: TargetShape,
    where: str,
    recorded: Mapping[str, Any] | None = None,
) -> HeadConfig:
    """What a checkpoint computes.

    Args:
        shapes: of its tensors, by canonical name.
        where: the checkpoint, for errors.
        recorded: its training.json, if it has one.

    Raises:
        ConfigurationError: a field is wrong, or does not suit the tensors or the target; names it and what is allowed.
    """
    fields = HeadFields.of(config, where)
    refuse_unserved(fields, {"is_causal": (True,)})
    eagle3 = layout.family == "eagle3"
    hidden = fields.number("hidden_size", target.hidden_size)
    heads = fields.number("num_attention_heads")
    head_dim = fields.number("head_dim", max(1, hidden // heads))
    sampler = "connector.mlp.down_proj.weight" in shapes
    two_outputs = not eagle3 and shapes.get("layers.0.mlp.down_proj.weight", (0,))[0] == 2 * hidden
    fused = not eagle3 or fields.flag("use_aux_hidden_state") is not False
    state_layers = _state_layers(fields, target, recorded or {}) if eagle3 and fused else (FINAL,)
    _check_target(fields, target, hidden, shapes, len(state_layers), eagle3=eagle3)
    return HeadConfig(
        family=layout.family if eagle3 else "fspad" if sampler or two_outputs else "eagle",
        hidden_size=hidden,
        head_dim=head_dim,
        state_layers=state_layers,
        window=_window(fields),
        sampler=sampler,
        two_outputs=two_outputs,
        fc=fused,
        fc_bias=_fc_bias(fields, shapes, eagle3),
        embed_norm=fields.shown_by("connector.embed_norm.weight", shapes, "add_para_norm", "layernorms"),
        state_norm="connector.state_norm.weight" in shapes,
        input_norm=not eagle3 and "layers.0.input_layernorm.weight" in shapes,
        output_norm=eagle3 or "norm.weight" in shapes,
        # Where EAGLE-1 has such a norm, engines feed back what comes after it.
        norm_output=fields.flag("norm_output") is True if eagle3 else "norm.weight" in shapes,
        norm_before_residual=eagle3 and _normed_residual(fields),
        norm_before_fc=fields.shown_by("states_norm.weight", shapes, "norm_before_fc") if eagle3 else False,
        fc_norm=fields.shown_by("fc_norm.0.weight", shapes, "fc_norm") if eagle3 else False,
        logit_scale=float(fields.fields.get("logit_scale") or 1.0),
        **shared_fields(fields, shapes, target, heads),
    )


def shared_fields(fields: HeadFields, shapes: Shapes, target: TargetShape, heads: int) -> dict[str, Any]:
    """What is read alike of heads of EAGLE's kind and of block drafters, whose layers are the same."""
    return {
        "target_hidden_size": target.hidden_size,
        "intermediate_size": fields.number("intermediate_size", shapes.get("layers.0.mlp.gate_proj.weight", (0,))[0]),
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads(fields, heads),
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size(fields, shapes, target),
        "num_layers": num_layers(fields, shapes),
        "hidden_act": activation(fields),
        "rms_norm_eps": float(fields.fields.get("rms_norm_eps") or 1e-6),
        "rope": rope(fields, target),
        "max_positions": fields.number("max_position_embeddings", 2048),
        "qkv_bias": qkv_bias(fields, shapes),
        "o_bias": "layers.0.self_attn.o_proj.bias" in shapes,
        "mlp_bias": fields.shown_by("layers.0.mlp.down_proj.bias", shapes, "mlp_bias"),
        "qk_norm": "layers.0.self_attn.q_norm.weight" in shapes,
        "own_embedding": "embed_tokens.weight" in shapes,
        "own_output": "lm_head.weight" in shapes,
    }


def unused(config: Mapping[str, Any], layout: HeadLayout, where: str) -> frozenset[str]:
    """Canonical names of tensors that are saved although this checkpoint does not use them.

    vLLM's form of EAGLE-1 saves the norms of a whole decoder and skips them, unless ``skip_prenorm`` and
    ``skip_output_norm`` are false.

    Args:
        where: the checkpoint, for errors.

    Raises:
        ConfigurationError: one of these flags is no flag.
    """
    if layout.family == "eagle3":
        return frozenset()
    fields = HeadFields.of(config, where)
    nested = isinstance(config.get("model"), dict)
    named = {"skip_prenorm": "layers.0.input_layernorm.weight", "skip_output_norm": "norm.weight"}
    skipped = {flag: said if (said := fields.flag(flag)) is not None else nested for flag in named}
    return frozenset(name for flag, name in named.items() if skipped[flag])


def refuse_unserved(fields: HeadFields, more: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse fields that change the arithmetic in a way that is not implemented.

    Args:
        more: fields of this kind of drafter, with the values that are implemented; absent ones count as the first.

    Raises:
        ConfigurationError: names the first such field.
    """
    for name, allowed in (_NEUTRAL | dict(more)).items():
        value = fields.fields.get(name, allowed[0])
        if value not in allowed:
            raise fields.refuse(name, value, f"{spelled(allowed[-1])}: nothing else is implemented")
    kind = fields.fields.get("model_type")
    if kind is not None and kind not in _MODEL_TYPES:
        raise fields.refuse("model_type", kind, f"one of {', '.join(_MODEL_TYPES)}: other layers are not implemented")


def _everywhere(value: object) -> Iterator[tuple[str, Any]]:
    """All fields at any depth."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield str(name), part
            yield from _everywhere(part)
    elif isinstance(value, list):
        for part in value:
            yield from _everywhere(part)


def _check_target(
    fields: HeadFields, target: TargetShape, hidden: int, shapes: Shapes, layers: int, *, eagle3: bool
) -> None:
    """Check that the head was made for a target of this shape."""
    said = fields.fields.get("target_hidden_size")
    if said is not None and said != target.hidden_size:
        raise fields.refuse("target_hidden_size", said, f"{target.hidden_size}, the target's")
    if not eagle3 and hidden != target.hidden_size:
        raise fields.refuse("hidden_size", hidden, f"{target.hidden_size}, the target's: it is another target's head")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if hidden != target.hidden_size and name not in shapes:
            allowed = f"{target.hidden_size}, the target's, since it has no {name} of its own"
            raise fields.refuse("hidden_size", hidden, allowed)
    vocabulary = fields.number("vocab_size", target.vocab_size)
    if vocabulary != target.vocab_size:
        raise fields.refuse("vocab_size", vocabulary, f"{target.vocab_size}, the target's: it is another target's head")
    read = shapes.get("fc.weight" if eagle3 else "connector.fc.weight", (0, 0))[1]
    wanted = layers * target.hidden_size if eagle3 else target.hidden_size + hidden
    if read and read != wanted:
        made_of = f"{layers} states of the target" if eagle3 else "an embedding and a state of the target"
        raise fields.refuse("the width of fc.weight", read, f"{wanted}, that of {made_of}")


def key_value_heads(fields: HeadFields, heads: int) -> int:
    """Heads of keys and values, which share the ``heads`` queries among them."""
    number = fields.number("num_key_value_heads", heads)
    if heads % number:
        raise fields.refuse("num_key_value_heads", number, f"a divisor of num_attention_heads, {heads}")
    return number


def draft_vocab_size(fields: HeadFields, shapes: Shapes, target: TargetShape) -> int:
    """How many tokens a checkpoint drafts.

    Raises:
        ConfigurationError: config.json and the tensors disagree.
    """
    mapped = [shapes[name][0] for name in (DRAFT_OFFSETS, DRAFT_IDS) if name in shapes]
    name = "draft_vocab_size" if fields.fields.get("draft_vocab_size") is not None else "truncated_vocab_size"
    size = fields.number(name, mapped[0] if mapped else target.vocab_size)
    if mapped and mapped[0] != size:
        raise fields.refuse(name, size, f"{mapped[0]}, the number of tokens that are drafted")
    if not mapped and size != target.vocab_size:
        raise fields.refuse(name, size, f"{target.vocab_size}, the target's vocab_size, since there is no d2t")
    return size


def num_layers(fields: HeadFields, shapes: Shapes) -> int:
    """Decoder layers, as the tensors say."""
    there = 1 + max((int(name.split(".")[1]) for name in shapes if name.startswith("layers.")), default=0)
    said = fields.number("num_hidden_layers", there)
    if said != there:
        raise fields.refuse("num_hidden_layers", said, f"{there}, the number of layers among the tensors")
    return there


def activation(fields: HeadFields) -> str:
    """The MLP's activation, see ``ACTIVATION_NAMES``."""
    name = str(fields.fields.get("hidden_act") or "silu")
    if name not in ACTIVATION_NAMES:
        raise fields.refuse("hidden_act", name, f"one of {', '.join(ACTIVATION_NAMES)}")
    return name


def rope(fields: HeadFields, target: TargetShape) -> Mapping[str, Any]:
    """The rotary parameters. Frequencies that depend on the text's length are served where they would not change."""
    found = rope_of(fields.fields)
    if by_layer := [name for name, value in found.items() if isinstance(value, Mapping)]:
        raise fields.refuse("rope_parameters", by_layer, "one for all layers: nothing else is implemented")
    kind, trained = found["rope_type"], fields.number("max_position_embeddings", 2048)
    if (share := found.get("partial_rotary_factor")) not in (None, 1):
        raise fields.refuse("partial_rotary_factor", share, "1: nothing else is implemented")
    if kind in FIXED or (kind == "dynamic" and target.max_positions <= trained):
        return found
    if kind == "dynamic":
        allowed = f"at least {target.max_positions}, the target's context: rope_type dynamic changes beyond the head's own"
        raise fields.refuse("max_position_embeddings", trained, allowed)
    raise fields.refuse("rope_type", kind, f"one of {', '.join((*FIXED, 'dynamic'))}")


def _window(fields: HeadFields) -> int | None:
    kinds = set(fields.fields.get("layer_types") or ())
    if not kinds <= {"full_attention", "sliding_attention"} or len(kinds) > 1:
        raise fields.refuse("layer_types", sorted(kinds), "all full_attention or all sliding_attention")
    if kinds == {"full_attention"} or fields.flag("use_sliding_window") is False:
        return None
    if fields.fields.get("sliding_window") is None:
        return None
    return fields.number("sliding_window")


def _fc_bias(fields: HeadFields, shapes: Shapes, eagle3: bool) -> bool:
    if eagle3:
        return "fc.bias" in shapes
    return fields.shown_by("connector.fc.bias", shapes, "bias", "fusion_bias", "eagle_fc_bias")


def qkv_bias(fields: HeadFields, shapes: Shapes) -> bool:
    """Whether queries, keys and values have biases."""
    there = fields.shown_by("layers.0.self_attn.q_proj.bias", shapes, "qkv_bias")
    # Qwen2 has these biases without the field, so that only true says something.
    if fields.flag("attention_bias") is True and not there:
        raise fields.refuse("attention_bias", "true", "false: self_attn.q_proj.bias is not among the tensors")
    return there


def _normed_residual(fields: HeadFields) -> bool:
    """The speculators library takes it as true for EAGLE-3 unless it is given, all others as false."""
    said = fields.flag("norm_before_residual")
    return fields.fields.get("speculators_model_type") == "eagle3" if said is None else said


def _state_layers(fields: HeadFields, target: TargetShape, recorded: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers that EAGLE-3 reads, as our ids: outputs of layers.

    Public ids are indices into transformers' ``hidden_states`` (vLLM, speculators: the output of layer k - 1), or layers
    themselves (SpecForge, SGLang). training.json says which, and else who wrote the file. A head with the wrong ones accepts
    next to nothing, which the canary shows.
    """
    given = fields.fields.get("eagle_aux_hidden_state_layer_ids")
    if not given:
        return target.eagle3_layers
    total = target.num_layers
    if not isinstance(given, list) or any(type(each) is not int or not 0 <= each <= total for each in given):
        raise fields.refuse("eagle_aux_hidden_state_layer_ids", given, f"layers of the target, from 0 to {total}")
    convention = recorded.get("layer_ids") or _convention(fields, given)
    if convention not in ("hidden_states", "layers"):
        raise fields.refuse("layer_ids in training.json", convention, "hidden_states or layers")
    ours = given if convention == "layers" else [FINAL if each == total else each - 1 for each in given]
    if convention == "hidden_states" and 0 in given:
        raise fields.refuse("eagle_aux_hidden_state_layer_ids", given, f"from 1 to {total}: 0 is the embedding")
    if convention == "layers" and total in given:
        raise fields.refuse("eagle_aux_hidden_state_layer_ids", given, f"from 0 to {total - 1}, layers of the target")
    return tuple(ours)


def _convention(fields: HeadFields, given: list[int]) -> str:
    if "speculators_model_type" in fields.fields:
        return "hidden_states"
    made_by_specforge = "LlamaForCausalLMEagle3" in (fields.fields.get("architectures") or ())
    return "layers" if made_by_specforge or given[0] == 1 else "hidden_states"
