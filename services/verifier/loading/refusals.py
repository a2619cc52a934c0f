"""Refuses models by their configuration, with a reason, before a weight is read and without torch.

``outrider plan`` checks ``config.json`` as it is in the folder; the verifier checks transformers' reading of it
again, with all defaults. Faults that show only in a pass are found while the model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from services.model_files.folder import read_json
from services.model_files.known_types import known_types, transformers_version
from services.model_files.weights.quantised.method import read_format
from speculation.errors import ConfigurationError, quoted

Config = Mapping[str, Any]

# transformers has a causal language model for the decoder of each.
_ENCODER_DECODERS = (
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart", "prophetnet",
    "trocr", "whisper",
)  # fmt: skip
_SOUND = ("moshi", "musicgen", "musicgen_melody", "moss_transcribe_diarize")
_RECURRENT = (
    "qwen4_exp", "qwen4_exp_text", "xlstm", "zaya",
)  # fmt: skip
# The layers of these that have a state are computed step by step (``services.verifier.recurrence``).
_STEPPED = (
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lara_mini", "lfm2",
    "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "zamba", "zamba2",
)  # fmt: skip
# Fields that list them, by turns or one for each layer.
_KINDS = ("layer_types", "layers_block_type", "block_types")
# The same as a letter for each layer: Mamba-2, attention, MLP, experts.
_PATTERN = "M*-E"
# Types of recurrent layers, as ``layer_types`` and its older forms name them.
_RECURRENT_LAYERS = ("linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "mamba2", "recurrent", "short_conv")
# Types of layers that compute each row by itself.
_ROWWISE_LAYERS = ("mlp", "moe")
_ATTENDING_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
# These models attend to later positions unless ``is_decoder`` is set; by default it is not.
_MASKED = (
    "bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "reformer", "rembert", "roberta",
    "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
# Fields that must be positive integers.
_COUNTS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions", "d_model", "n_layers",
    "n_heads", "num_layers", "num_heads", "conv_L_cache", "linear_conv_kernel_dim", "linear_head_dim", "linear_key_head_dim",
    "linear_num_heads", "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim", "mamba_d_conv",
    "mamba_d_state", "mamba_n_heads", "n_mamba_heads", "conv_kernel", "ssm_state_size", "state_size", "attn_layer_period",
    "expert_layer_period",
)  # fmt: skip
# The first of each pair must be a multiple of the second.
_MULTIPLES = (("num_attention_heads", "num_key_value_heads"), ("linear_num_value_heads", "linear_num_key_heads"))
_WINDOWS = ("sliding_window", "attention_chunk_size")
_DTYPES = ("float64", "float32", "float16", "bfloat16")
# Settings with which transformers would load other files than the usual ones, or run other code.
_ELSEWHERE = ("transformers_weights", "fusion_config", "distributed_config")


def check_config(folder: Path) -> dict[str, Any]:
    """A model's config.json.

    Raises:
        ConfigurationError: it cannot be read, or the model cannot be served; says why.
    """
    config = read_json(folder / "config.json")
    refuse_unsupported(config, folder)
    return config


def refuse_unsupported(config: Config, folder: Path) -> None:
    """Refuse models that cannot be served, or that would compute something else than the model means without an error.

    Args:
        config: ``config.json``, or the whole configuration that transformers makes of it.

    Raises:
        ConfigurationError: names the model type or the setting, and what it would need.
    """
    for rule in _RULES:
        fault = rule(config)
        if fault is not None:
            why = f"cannot load the model at {folder}: {fault.reason}"
            raise ConfigurationError(why, about=fault.field, value=fault.value)


class _Fault(NamedTuple):
    """Why a model cannot be served, and by which field of its configuration that shows."""

    field: str
    value: object
    reason: str


def _wrong(field: str, value: object, allowed: str) -> _Fault:
    return _Fault(field, value, f"{field} is {quoted(value)[:40]} in config.json: must be {allowed}")


def _parts(config: Config) -> Iterator[tuple[str, Config]]:
    """The configuration and, if there is one, its language model's; each after the prefix of its fields."""
    yield "", config
    text = config.get("text_config")
    if isinstance(text, Mapping):
        yield "text_config.", text


def _unknown(config: Config) -> _Fault | None:
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        said = "config.json names no model_type" if kind is None else f"model_type is {kind!r}: must be a type's name"
        return _Fault("model_type", kind, said)
    known = known_types()
    if known is None or kind in known.all:
        return None
    code = " and code that comes with a checkpoint (auto_map) is never run;" if config.get("auto_map") else ""
    return _Fault(
        "model_type",
        kind,
        f"model_type is {kind}, which {transformers_version()} does not know;{code} a newer transformers may",
    )


def _quantised(config: Config) -> _Fault | None:
    try:
        read_format(config)
    except ConfigurationError as error:
        return _Fault(error.field, error.value, f"config.json: {error}")
    return None


def _elsewhere(config: Config) -> _Fault | None:
    for name in _ELSEWHERE:
        if config.get(name):
            return _Fault(
                name,
                config[name],
                f"{name} is set in config.json: remove it, models are loaded from model.safetensors and by their own code",
            )
    return None


def _sound(config: Config) -> _Fault | None:
    kind = config["model_type"]
    if kind in _SOUND:
        return _Fault(
            "model_type", kind, f"{kind} speaks in sound or listens to it, and is no language model for text alone"
        )
    return None


def _encoder_decoder(config: Config) -> _Fault | None:
    kind, known = config["model_type"], known_types()
    others = known.seq2seq - known.causal if known is not None else ()
    if config.get("is_encoder_decoder") is not True and kind not in _ENCODER_DECODERS and kind not in others:
        return None
    return _Fault(
        "model_type",
        kind,
        f"{kind} is an encoder-decoder: every token of its answer attends to what an encoder makes of the prompt, which "
        "would have to be computed and kept for each request; models that are a decoder alone are served",
    )


def _other_kind(config: Config) -> _Fault | None:
    kind, known = config["model_type"], known_types()
    if known is None or kind in known.causal:
        return None
    if kind in known.multimodal or any(config.get(name) for name in ("vision_config", "audio_config")):
        return _Fault(
            "model_type",
            kind,
            f"{kind} takes pictures or sound beside text, and {transformers_version()} has no causal language model of "
            "this type alone; save its language model as a checkpoint of its own",
        )
    if kind in known.masked:
        return _Fault("model_type", kind, f"{kind} is a masked language model: it fills gaps, and cannot continue a text")
    return _Fault(
        "model_type",
        kind,
        f"{kind} is no language model that continues a text: {transformers_version()} has no causal one of this type",
    )


def _masked(config: Config) -> _Fault | None:
    if config["model_type"] not in _MASKED or config.get("is_decoder") is True:
        return None
    return _Fault(
        "is_decoder",
        False,
        f"{config['model_type']} with is_decoder: false is a masked language model: it sees the tokens behind a position as "
        "well, fills gaps, and cannot continue a text",
    )


def _recurrent(config: Config) -> _Fault | None:
    kind = config["model_type"]
    if kind in _STEPPED:
        return None
    layers = sorted({name for _, part in _parts(config) for name in _layer_types(part) if name in _RECURRENT_LAYERS})
    if kind not in _RECURRENT and not layers:
        return None
    which = f"layers of the type {', '.join(layers)}" if layers else "layers with a recurrent state"
    return _Fault(
        "model_type",
        kind,
        f"{kind} has {which}: their state cannot step back to where a draft was rejected, which would need a snapshot of "
        "it at every node of a tree; docs/models.md names the types that are served",
    )


def _layer_types(part: Config) -> list[str]:
    given = next((part[name] for name in _KINDS if part.get(name)), None)
    return [name for name in given if isinstance(name, str)] if isinstance(given, list | tuple) else []


def _attention(config: Config) -> _Fault | None:
    known = {*_ATTENDING_LAYERS, *_ROWWISE_LAYERS, *(_RECURRENT_LAYERS if config["model_type"] in _STEPPED else ())}
    for _, part in _parts(config):
        others = sorted({*_layer_types(part)} - known)
        if others:
            field = next(name for name in _KINDS if part.get(name))
            return _Fault(field, ", ".join(others), f"models with layers of the type {', '.join(others)} are not supported")
    return None


def _loops(config: Config) -> _Fault | None:
    for prefix, part in _parts(config):
        mode = part.get("recurrent_kv_cache_mode")
        if mode not in (None, "per_loop"):
            # Otherwise a row attends to other keys, depending on which rows are computed together with it.
            return _wrong(f"{prefix}recurrent_kv_cache_mode", mode, "per_loop")
    return None


def _shapes(config: Config) -> _Fault | None:
    """Check the types of the fields that the other rules read."""
    for name in ("text_config", "auto_map"):
        if not isinstance(config.get(name), Mapping | None):
            return _wrong(name, config[name], "an object")
    for prefix, part in _parts(config):
        for name in _KINDS:
            if not isinstance(part.get(name), list | tuple | None):
                return _wrong(f"{prefix}{name}", part[name], "a list of names")
        pattern = part.get("hybrid_override_pattern")
        if pattern is not None and not (isinstance(pattern, str) and set(pattern) <= set(_PATTERN)):
            return _wrong(f"{prefix}hybrid_override_pattern", pattern, f"one of {' '.join(_PATTERN)} for each layer")
    return None


def _sizes(config: Config) -> _Fault | None:
    for prefix, part in _parts(config):
        for name in _COUNTS:
            value = part.get(name)
            if value is None or isinstance(value, list | tuple):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                return _wrong(f"{prefix}{name}", value, "a whole number from 1 on")
        for name in _WINDOWS:
            value = part.get(name)
            if any(type(one) not in (int, type(None)) for one in (value if isinstance(value, list | tuple) else (value,))):
                return _wrong(f"{prefix}{name}", value, "a whole number, or null")
        for name, of in _MULTIPLES:
            heads, shared = part.get(name), part.get(of)
            if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
                said = f"{prefix}{name} is {heads} in config.json: must be a multiple of {of}, {shared}"
                return _Fault(f"{prefix}{name}", heads, said)
        for name in ("dtype", "torch_dtype"):
            value = part.get(name)
            if value is not None and str(value).removeprefix("torch.") not in _DTYPES:
                return _wrong(f"{prefix}{name}", value, f"one of {', '.join(_DTYPES)}")
    return None


def _positions(config: Config) -> _Fault | None:
    for prefix, part in _parts(config):
        for name in ("rope_parameters", "rope_scaling"):
            given = part.get(name)
            if given is None:
                continue
            if not isinstance(given, Mapping):
                return _wrong(f"{prefix}{name}", given, "an object with a rope_type")
            for rope in (given, *(value for value in given.values() if isinstance(value, Mapping))):
                if "longrope" in str(rope.get("rope_type", rope.get("type", ""))):
                    # transformers chooses the factors by the longest position in the pass.
                    return _Fault(
                        f"{prefix}{name}",
                        given,
                        f"models with longrope positions ({prefix}{name}) are not supported: their factors change with the "
                        "longest request of a pass, so one request would change another's tokens",
                    )
    return None


_RULES: tuple[Callable[[Config], _Fault | None], ...] = (
    _unknown, _shapes, _quantised, _elsewhere, _sound, _encoder_decoder, _other_kind, _masked, _recurrent, _attention,
    _sizes, _positions,
    _loops,
)  # fmt: skip
