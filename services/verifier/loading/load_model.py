"""Loads a model's weights from its folder: all of them, or those of a few layers."""

from __future__ import annotations

import logging
from collections.abc import Set
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from services.model_files.folder import reading
from services.model_files.weights.files import WeightFiles
from services.model_files.weights.headers import BLOCKS_FILE, check_weights
from services.model_files.weights.stored_blocks import StoredBlocks, StoredLinear, Weight
from services.verifier.attention import calls as attention
from services.verifier.config import TargetConfig
from services.verifier.kernels.native.library import library
from services.verifier.loading import adapters
from services.verifier.loading.complete import (
    mismatched,
    missing,
    refuse_incomplete,
    refuse_nonsense,
    refuse_unused,
    without_report,
)
from services.verifier.loading.hollow import without_weights
from services.verifier.loading.memory import arithmetic_dtype
from services.verifier.loading.refusals import check_config, refuse_unsupported
from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)

# What the module after the last layer is called.
_FINAL_NORMS = ("norm", "embedding_norm", "final_layernorm", "norm_f")


def load_dtype(config: TargetConfig) -> torch.dtype:
    """The type in which weights are loaded; those that become int8 on a CPU are loaded in their stored type.

    On a GPU torchao multiplies in the type that it has quantised from.
    """
    if config.dtype == "int8" and config.device == "cpu":
        return read_config(config).dtype or torch.float32
    return arithmetic_dtype(config)


def load_whole(config: TargetConfig) -> PreTrainedModel:
    """The whole model, on the CPU.

    Raises:
        ConfigurationError: it cannot be loaded; says why.
    """
    attention.register()
    adapters.register()
    folder = Path(config.model_path)
    check_files(config)
    if config.shared_with is not None or (folder / BLOCKS_FILE).is_file() or stored_in_halves(config):
        return _load_as_stored(config)
    with reading(f"load the model at {folder}", about=folder), without_report():
        model, info = AutoModelForCausalLM.from_pretrained(
            config.model_path,
            dtype=load_dtype(config),
            attn_implementation=attention.NAME,
            trust_remote_code=False,
            use_safetensors=True,
            # refuse_incomplete refuses them by name.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            # Read elsewhere, see services/model_files/generation_config.py.
            generation_config=GenerationConfig(),
        )
        refuse_incomplete(model, info, folder)
        refuse_nonsense(model, folder)
    loaded: PreTrainedModel = model
    return loaded


def keeps_stored(config: TargetConfig) -> bool:
    """Whether linear layers may keep weights as stored in the files, which only our kernels can read."""
    wanted = config.weights != "float32" and config.dtype == "float32" and config.device == "cpu"
    return wanted and config.kernels not in ("onednn", "torch") and library(config.kernels) is not None


def stored_in_halves(config: TargetConfig) -> bool:
    """Whether the files hold bfloat16 weights under the model's own names, which need not become float32."""
    if not keeps_stored(config) or read_config(config).dtype != torch.bfloat16:
        return False
    with WeightFiles(Path(config.model_path)) as files:
        model = hollow_model(config)
        return all(name in files or name in model.all_tied_weights_keys for name in model.state_dict())


def _load_as_stored(config: TargetConfig) -> PreTrainedModel:
    """The whole model from files that use its own names; linear layers keep their weights as stored.

    Raises:
        ConfigurationError: a weight is missing, or has another shape.
    """
    folder = Path(config.model_path)
    with reading(f"load the model at {folder}", about=folder):
        model: PreTrainedModel = without_weights(
            lambda: AutoModelForCausalLM.from_config(
                read_config(config), dtype=load_dtype(config), attn_implementation=attention.NAME
            )
        )
        with WeightFiles(folder, config.shared_with) as files:
            refuse_unused(model, files.names - model.state_dict().keys(), folder)
        _read_weights(model, config, "", 0)
        refuse_nonsense(model, folder)
    return model


def check_files(config: TargetConfig) -> None:
    """Check by their headers that configuration and weights are complete, and that the model can be served.

    Raises:
        ConfigurationError: says what is wrong, and where.
    """
    folder = Path(config.model_path)
    with reading(f"load the model at {folder}", about=folder):
        check_weights(folder, check_config(folder), config.shared_with)


def read_config(config: TargetConfig) -> PreTrainedConfig:
    """The model's own configuration.

    Raises:
        ConfigurationError: it is missing, or its architecture is unknown or cannot be served; says why.
    """
    folder = Path(config.model_path)
    with reading(f"interpret {folder / 'config.json'}", about=folder / "config.json"):
        check_config(folder)
        found: PreTrainedConfig = AutoConfig.from_pretrained(config.model_path, trust_remote_code=False)
        # Checked again with the defaults that config.json leaves out.
        refuse_unsupported(found.to_dict(), folder)
    return found


def split_layers(config: TargetConfig) -> list[range]:
    """The layers of each pipeline stage. The output layer counts as many layers as its weights amount to.

    Raises:
        ConfigurationError: there are more stages than layers.
    """
    text = read_config(config).get_text_config()
    count: int = text.num_hidden_layers
    if not 1 <= config.stages <= count:
        raise _not_split(config, f"the model has {count} layers, so 1 to {count} are possible")
    if config.stages == 1:
        return [range(count)]
    decoder = _skeleton(config).get_decoder()
    head = text.vocab_size * text.hidden_size / sum(parameter.numel() for parameter in decoder.layers[0].parameters())
    share = (count + head) / config.stages
    # Every stage gets a layer, however large the output layer is.
    ends = [
        min(max(round(share * (stage + 1)), stage + 1), count - (config.stages - 1 - stage))
        for stage in range(config.stages)
    ]
    ends[-1] = count
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def load_layers(config: TargetConfig, layers: range) -> PreTrainedModel:
    """A model with ``layers`` only; the first stage also has the embeddings, the last one the output layer.

    No other weight is read.

    Raises:
        ConfigurationError: the model cannot be split; says why.
    """
    check_files(config)
    with reading(f"load the model at {config.model_path}", about=config.model_path):
        return _load_layers(config, layers)


def _load_layers(config: TargetConfig, layers: range) -> PreTrainedModel:
    model, folder = _skeleton(config), Path(config.model_path)
    with WeightFiles(folder) as files:
        # A name that the model does not have is often a weight in another layout.
        _check_names(model, files.names, config)
    decoder, text = model.get_decoder(), model.config.get_text_config()
    first, last = layers.start == 0, layers.stop == len(decoder.layers)
    decoder.layers = nn.ModuleList(decoder.layers[layers.start : layers.stop])
    text.num_hidden_layers = len(layers)
    try:
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[layers.start : layers.stop]
    except AttributeError as error:
        named = "the types of its layers follow from other settings"
        raise _not_split(config, f"{type(model).__name__} cannot be split, {named}") from error
    if not first:
        decoder.embed_tokens = nn.Identity()
    if not last:
        setattr(decoder, final_norm(decoder), nn.Identity())
        model.lm_head = nn.Identity()
    dtype = load_dtype(config)
    _read_weights(model, config, f"{model.base_model_prefix}.layers.", layers.start)
    refuse_nonsense(model, folder)
    # Rebuilt, since a skeleton has not computed it and files do not store it.
    decoder.rotary_emb = type(decoder.rotary_emb)(text)
    hollow = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if hollow:
        raise _not_split(config, f"{type(model).__name__} cannot be split, {hollow[0]} is not stored")
    _check_passes_through(model, dtype)
    return model


def _check_names(model: PreTrainedModel, names: Set[str], config: TargetConfig) -> None:
    """Check that the files name all weights as the whole model does.

    Raises:
        ConfigurationError: they do not, so transformers would rename, join or split weights when it loads the whole model.
    """
    wanted = model.state_dict().keys() - model.all_tied_weights_keys.keys()
    if others := sorted(wanted - names):
        more = f", nor {len(others) - 1} others" if len(others) > 1 else ""
        lacking = f"the files in {config.model_path} hold no {others[0]}{more}"
        raise _not_split(config, f"{type(model).__name__} cannot be split, {lacking}")
    refuse_unused(model, names - model.state_dict().keys(), Path(config.model_path))


def _skeleton(config: TargetConfig) -> PreTrainedModel:
    """The model without weights.

    Raises:
        ConfigurationError: its structure cannot be split.
    """
    model = hollow_model(config)
    decoder = model.get_decoder()
    if not all(hasattr(decoder, name) for name in ("layers", final_norm(decoder), "embed_tokens", "rotary_emb")):
        raise _not_split(config, f"{type(model).__name__} cannot be split, use stages: 1")
    return model


def final_norm(decoder: nn.Module) -> str:
    """Name of the module that a decoder applies after its layers: ``norm``, unless it has one of another known name."""
    return next((name for name in _FINAL_NORMS if hasattr(decoder, name)), _FINAL_NORMS[0])


def _not_split(config: TargetConfig, why: str) -> ConfigurationError:
    return ConfigurationError(why, field="stages", value=config.stages)


def hollow_model(config: TargetConfig) -> PreTrainedModel:
    attention.register()
    adapters.register()
    with reading(f"load the model at {config.model_path}", about=config.model_path), torch.device("meta"):
        found = read_config(config)
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                found, dtype=load_dtype(config), attn_implementation=attention.NAME
            )
        except KeyError as error:
            if error.args != (attention.NAME,):
                raise
            raise NotImplementedError(
                f"models of the type {found.model_type} compute attention by classes of their own, not through "
                "transformers' attention interface"
            ) from error
    return model


def _read_weights(model: PreTrainedModel, config: TargetConfig, layer_prefix: str, offset: int) -> None:
    """Load the weights that the skeleton still has, by their names in the whole model; its first layer is number ``offset``.

    Raises:
        ConfigurationError: a weight is missing, or has another shape.
    """
    folder, tied = Path(config.model_path), model.all_tied_weights_keys
    state: dict[str, torch.Tensor] = {}
    lacking: list[str] = []
    with WeightFiles(folder, config.shared_with) as files:
        for name, place in list(model.state_dict().items()):
            stored = name
            if layer_prefix and name.startswith(layer_prefix):
                number, _, rest = name.removeprefix(layer_prefix).partition(".")
                stored = f"{layer_prefix}{int(number) + offset}.{rest}"
            if stored not in files:
                stored = tied.get(stored, stored)
            if stored not in files:
                lacking.append(stored)
                continue
            weight = files.get(stored)
            if tuple(weight.shape) != tuple(place.shape):
                raise mismatched(stored, weight.shape, place.shape, folder)
            if isinstance(weight, StoredBlocks) and keeps_stored(config) and _make_room(model, name, weight):
                continue
            state[name] = _as_tensor(weight, name, model, config)
    if lacking:
        raise missing(model, lacking, folder)
    # Layers with weights in blocks have no torch weight any more, so strict loading would fail.
    model.load_state_dict(state, assign=True, strict=False)


def _linear(model: PreTrainedModel, weight_name: str) -> tuple[nn.Module, str] | None:
    """Parent and name of the linear layer that has the weight; None: it is not the weight of a linear layer."""
    if not weight_name.endswith(".weight"):
        return None
    parent_name, _, own = weight_name.removesuffix(".weight").rpartition(".")
    parent = model.get_submodule(parent_name)
    return (parent, own) if type(getattr(parent, own, None)) is nn.Linear else None


def _make_room(model: PreTrainedModel, name: str, weight: StoredBlocks) -> bool:
    """Replace the layer by one that keeps its weight in blocks; False: it is not a linear layer."""
    if (place := _linear(model, name)) is None:
        return False
    parent, own = place
    setattr(parent, own, StoredLinear(weight, getattr(parent, own).bias))
    return True


def _as_tensor(weight: Weight, name: str, model: PreTrainedModel, config: TargetConfig) -> torch.Tensor:
    if isinstance(weight, StoredBlocks):
        return weight.float().to(load_dtype(config))
    if weight.dtype == torch.bfloat16 and keeps_stored(config) and _linear(model, name) is not None:
        return weight
    return weight.to(load_dtype(config))


@torch.inference_mode()
def _check_passes_through(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Check that hidden states enter and leave the layers unchanged: some models scale them before the first layer.

    Raises:
        ConfigurationError: they do not.
    """
    decoder, text = model.get_decoder(), model.config.get_text_config()
    layers, norm, count = decoder.layers, getattr(decoder, final_norm(decoder)), text.num_hidden_layers
    decoder.layers, text.num_hidden_layers = nn.ModuleList(), 0
    setattr(decoder, final_norm(decoder), nn.Identity())
    try:
        given = torch.randn(1, 2, text.hidden_size, dtype=dtype)
        made = decoder(inputs_embeds=given, position_ids=torch.arange(2)[None], use_cache=False).last_hidden_state
    finally:
        decoder.layers, text.num_hidden_layers = layers, count
        setattr(decoder, final_norm(decoder), norm)
    if not torch.equal(made, given):
        raise ConfigurationError(
            f"{type(model).__name__} cannot be split: it changes what enters its first layer; use stages: 1",
            about=type(model).__name__,
        )
