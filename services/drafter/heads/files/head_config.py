"""What a drafter of hidden states computes: every flag of every public layout that changes its arithmetic, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from speculation.errors import ConfigurationError

Family = Literal["eagle", "fspad", "eagle3", "dflash"]

# Activations of its MLP, as config.json names them.
ACTIVATION_NAMES = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu")
# Types of rotary embeddings whose frequencies do not depend on the length of the text.
FIXED = ("default", "linear", "llama3", "yarn")
# Rotary base of heads whose config.json names none.
DEFAULT_THETA = 10_000.0
# The output layer's input, after the final norm (``Features.layers``).
FINAL = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetShape:
    """What a head must know about its target, from the target's config.json.

    Attributes:
        max_positions: longest context that is served.
        config: the whole of config.json, or its part about the language model.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    max_positions: int
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def eagle3_layers(self) -> tuple[int, ...]:
        """EAGLE-3's three layers if a checkpoint names none: outputs of the layers before 2, n // 2 and n - 3."""
        layers = self.num_layers
        return (1, layers // 2 - 1, layers - 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """A head. Sizes first, then the flags.

    ``h`` is the head's hidden size, ``h_t`` the target's.

    Attributes:
        family: ``eagle`` fuses embedding and state by one matrix; ``fspad`` is one with a feature sampler, two outputs, or
            both; ``eagle3`` attends to embedding and state side by side; ``dflash`` attends to states beside a block's rows.
        state_layers: layers of the target whose states it reads, in this order; see ``Features.layers``.
        rope: transformers' ``rope_parameters``: ``rope_theta``, ``rope_type`` and what the type needs.
        max_positions: positions that the head was trained for.
        window: most rows that its attention sees, itself included; None: all.
        sampler: FSPAD's feature sampler behind ``fc``.
        two_outputs: FSPAD's partial alignment: the MLP writes 2 h, the first half for the output layer, the second fed back.
        fc: whether there is a matrix that fuses the states (only an ``eagle3`` that reads one layer may have none).
        qk_norm: norms on queries and keys, per attention head (Qwen3).
        embed_norm: ``eagle``: a norm on the embedding before ``fc`` (HASS).
        state_norm: ``eagle``: a norm on the state before ``fc`` (HASS).
        input_norm: ``eagle``: a norm before the first layer's attention.
        output_norm: a norm before the output layer.
        norm_output: the state fed back is the one after this norm.
        norm_before_residual: ``eagle3``: the first residual is the normed state.
        norm_before_fc: ``eagle3``: one norm over all states together.
        fc_norm: ``eagle3``: one norm for the state of each layer.
        own_embedding: it has embeddings of its own.
        own_output: it has an output layer of its own, over the draft vocabulary.
        logit_scale: factor on the logits.
        mask_token_id: P-EAGLE: the token that stands where one is to be guessed; None: it guesses one token at a time.
        levels: P-EAGLE: most tokens that it guesses at once.
    """

    family: Family
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    num_layers: int = 1
    state_layers: tuple[int, ...] = (FINAL,)
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": DEFAULT_THETA})
    max_positions: int = 2048
    window: int | None = None
    sampler: bool = False
    two_outputs: bool = False
    fc: bool = True
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    embed_norm: bool = False
    state_norm: bool = False
    input_norm: bool = False
    output_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    own_embedding: bool = False
    own_output: bool = False
    logit_scale: float = 1.0
    mask_token_id: int | None = None
    levels: int = 1

    @property
    def source(self) -> str:
        """The source that runs it."""
        return self.family if self.mask_token_id is None else "peagle"

    @property
    def embedding_size(self) -> int:
        """Width of the embeddings that it reads."""
        return self.hidden_size if self.own_embedding else self.target_hidden_size

    @property
    def state_size(self) -> int:
        """Width of a state as the target gives it: that of all ``state_layers`` together."""
        return self.target_hidden_size * len(self.state_layers)

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each tensor of a Llama's layer of these sizes, the shape, by its name within the layer."""
        size, inner, dim = self.hidden_size, self.intermediate_size, self.head_dim
        queries, keys = self.num_attention_heads * dim, self.num_key_value_heads * dim
        matrices = {
            "self_attn.q_proj": (queries, size, self.qkv_bias),
            "self_attn.k_proj": (keys, size, self.qkv_bias),
            "self_attn.v_proj": (keys, size, self.qkv_bias),
            "self_attn.o_proj": (size, queries, self.o_bias),
            "mlp.gate_proj": (inner, size, self.mlp_bias),
            "mlp.up_proj": (inner, size, self.mlp_bias),
            "mlp.down_proj": (size, inner, self.mlp_bias),
        }
        norms = {"input_layernorm": size, "post_attention_layernorm": size}
        if self.qk_norm:
            norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
        found: dict[str, tuple[int, ...]] = {f"{name}.weight": (width,) for name, width in norms.items()}
        for name, (written, read, bias) in matrices.items():
            found[f"{name}.weight"] = (written, read)
            if bias:
                found[f"{name}.bias"] = (written,)
        return found


def head_for(
    target: TargetShape,
    family: Family,
    *,
    draft_vocab_size: int | None = None,
    sampler: bool | None = None,
    two_outputs: bool | None = None,
    **flags: Any,
) -> HeadConfig:
    """The configuration of a new head, of the shape of one of the target's layers.

    Args:
        sampler, two_outputs: FSPAD's two parts; both, if not given, for ``family="fspad"``.
        flags: further fields of ``HeadConfig``; they replace what is taken from the target.

    Raises:
        ConfigurationError: the target's config.json lacks a size of a Llama's layer.
    """
    config, eagle3 = target.config, family == "eagle3"
    for name in ("num_attention_heads", "intermediate_size"):
        if name not in config and name not in flags:
            raise ConfigurationError(
                f"the target's config.json has no {name}: a head has the shape of a Llama's layer", about=name
            )
    heads = int(config["num_attention_heads"])
    fspad = family == "fspad"
    fields: dict[str, Any] = {
        "family": family,
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": int(config["intermediate_size"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or target.hidden_size // heads),
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size or target.vocab_size,
        "state_layers": target.eagle3_layers if eagle3 else (FINAL,),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope": _rope_of_head(config),
        "max_positions": target.max_positions,
        "sampler": fspad if sampler is None else sampler,
        "two_outputs": fspad if two_outputs is None else two_outputs,
        "fc_bias": not eagle3,
        "output_norm": eagle3,
        "own_output": eagle3,
    }
    return HeadConfig(**{**fields, **flags})


def _rope_of_head(config: Mapping[str, Any]) -> dict[str, Any]:
    """A target's rotary parameters, of several those of full attention, for a layer that turns all numbers of its heads."""
    given = config.get("rope_parameters")
    if isinstance(given, Mapping) and isinstance(own := given.get("full_attention"), Mapping):
        config = {**config, "rope_parameters": own}
    return {name: value for name, value in rope_of(config).items() if name != "partial_rotary_factor"}


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters of a config.json, in the present form, from the present form or an older one."""
    scaling = config.get("rope_scaling")
    given = config.get("rope_parameters")
    rope = dict(given if isinstance(given, Mapping) else scaling if isinstance(scaling, Mapping) else {})
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = float(config.get("rope_theta") or DEFAULT_THETA)
    return rope
