"""Loads a model's weights from its folder: all of them, or those of a few layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from services.model_files.folder import reading
from services.model_files.weights.files import WeightFiles
from services.model_files.weights.for_transformers import from_pretrained, making_a_model
from services.model_files.weights.headers import BLOCKS_FILE
from services.model_files.weights.quantised.method import format_of
from services.verifier.attention import calls as attention
from services.verifier.config import TargetConfig
from services.verifier.kernels.cpu_choice import check_named
from services.verifier.kernels.native.library import library
from services.verifier.loading import adapters
from services.verifier.loading.adapters import inputs_of
from services.verifier.loading.complete import (
    refuse_incomplete,
    refuse_nonsense,
    refuse_unused,
    without_report,
)
from services.verifier.loading.cut_layers import cut_layers, gather_between
from services.verifier.loading.decoder_parts import DecoderParts
from services.verifier.loading.hollow import weights_on_meta, without_weights
from services.verifier.loading.joined_weights import JoinedWeights
from services.verifier.loading.layer_names import LayerNames
from services.verifier.loading.model_config import check_files, load_dtype, read_config
from services.verifier.loading.read_weights import WantedWeights, read_weights
from services.verifier.loading.rounding import round_entering, rounds
from services.verifier.stages.stage_ranks import Cut, StageRanks
from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)

_WHOLE: Mapping[str, Cut] = {}


def load_whole(config: TargetConfig) -> PreTrainedModel:
    """The whole model, on the CPU.

    Raises:
        ConfigurationError: it cannot be loaded; says why.
    """
    attention.register()
    adapters.register()
    folder = Path(config.model_path)
    check_files(config)
    check_named(config)
    quantised = format_of(folder)
    if quantised is not None:
        log.info("%s is %s, served as the numbers that it stands for", folder, quantised.name)
    if config.shared_with is not None or (folder / BLOCKS_FILE).is_file() or stored_in_halves(config):
        return _load_as_stored(config)
    if quantised is not None and (has_own_names(config) or keeps_experts(config)):
        return _load_as_stored(config)
    with reading(f"load the model at {folder}", about=folder), ExitStack() as stack:
        load: Callable[..., Any] = partial(
            AutoModelForCausalLM.from_pretrained, folder, trust_remote_code=False, use_safetensors=True
        )
        if quantised is not None:
            load = from_pretrained(read_config(config), stack.enter_context(WeightFiles(folder)))
        with making_a_model(), without_report():
            model, info = load(
                dtype=load_dtype(config),
                attn_implementation=attention.NAME,
                # refuse_incomplete refuses them by name.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                # Read elsewhere, see services/model_files/generation_config.py.
                generation_config=GenerationConfig(),
            )
        refuse_incomplete(model, info, folder)
        refuse_nonsense(model, folder)
        _round(model, config)
    loaded: PreTrainedModel = model
    return loaded


def load_beside(config: TargetConfig) -> PreTrainedModel:
    """As ``load_whole``, while another model computes in this process: nothing is changed that all threads share.

    transformers' own loading changes torch's default type, which is no change for float32.

    Raises:
        ConfigurationError: it cannot be loaded, or not so; says why.
    """
    check_files(config)
    if has_own_names(config):
        return _load_as_stored(config, torch.float32)
    if load_dtype(config) != torch.float32:
        raise ConfigurationError(
            "weights that transformers has to rename or to join are replaced while serving with float32 alone",
            field="verifier.dtype",
            value=config.dtype,
        )
    return load_whole(config)


def keeps_stored(config: TargetConfig) -> bool:
    """Whether linear layers may keep weights as stored in the files, which only our kernels can read."""
    wanted = config.weights != "float32" and config.dtype == "float32" and config.device == "cpu"
    return wanted and config.kernels not in ("onednn", "torch") and library(config.kernels) is not None


def stored_in_halves(config: TargetConfig) -> bool:
    """Whether the files hold bfloat16 weights under the model's own names, which need not become float32."""
    return keeps_stored(config) and read_config(config).dtype == torch.bfloat16 and has_own_names(config)


def has_own_names(config: TargetConfig) -> bool:
    """Whether the files name all weights as the model does, so that transformers need not rename, join or split them."""
    with WeightFiles(Path(config.model_path)) as files:
        model = hollow_model(config, torch.float32)
        return all(name in files or name in model.all_tied_weights_keys for name in model.state_dict())


def keeps_experts(config: TargetConfig) -> bool:
    """Whether a quantised checkpoint has a matrix for each expert, which are joined without expanding them."""
    if not keeps_stored(config) or format_of(Path(config.model_path)) is None:
        return False
    with WeightFiles(Path(config.model_path)) as files:
        model = hollow_model(config, torch.float32)
        wanted = model.state_dict().keys()
        joined = JoinedWeights(files, model, wanted)
    if not joined.stacked or wanted - model.all_tied_weights_keys.keys() - joined.names:
        return False
    try:
        refuse_unused(model, joined.names - wanted, Path(config.model_path))
    except ConfigurationError:
        # transformers may know that the others are not needed.
        return False
    return True


def _load_as_stored(config: TargetConfig, made_in: torch.dtype | None = None) -> PreTrainedModel:
    """The whole model from files that use its own names, or such as are joined here; linear layers and experts keep their
    weights as stored.

    Args:
        made_in: the type of what is computed rather than read; None: that of the weights.

    Raises:
        ConfigurationError: a weight is missing, or has another shape.
    """
    folder = Path(config.model_path)
    with reading(f"load the model at {folder}", about=folder):
        with making_a_model():
            model: PreTrainedModel = without_weights(lambda: _made_anew(config, made_in))
        with WeightFiles(folder, config.shared_with) as files:
            wanted = model.state_dict().keys()
            refuse_unused(model, JoinedWeights(files, model, wanted).names - wanted, folder)
        _read(model, config)
        refuse_nonsense(model, folder)
        _round(model, config)
    return model


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
    layers = _parts_of(hollow_model(config, torch.float32), config).layers
    head = text.vocab_size * text.hidden_size / sum(parameter.numel() for parameter in layers[0].parameters())
    share = (count + head) / config.stages
    # Every stage gets a layer, however large the output layer is.
    ends = [
        min(max(round(share * (stage + 1)), stage + 1), count - (config.stages - 1 - stage))
        for stage in range(config.stages)
    ]
    ends[-1] = count
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def load_layers(config: TargetConfig, layers: range, shards: StageRanks | None = None) -> PreTrainedModel:
    """A model with ``layers`` only; the first stage also has the embeddings, the last one the output layer.

    No other weight is read.

    Args:
        shards: those of the stage, of which this process gets its own; None: the whole layers.

    Raises:
        ConfigurationError: the model cannot be split; says why.
    """
    check_files(config)
    check_named(config)
    with reading(f"load the model at {config.model_path}", about=config.model_path):
        return _load_layers(config, layers, shards)


def load_layers_beside(config: TargetConfig, layers: range, shards: StageRanks | None = None) -> PreTrainedModel:
    """As ``load_layers``, while another model computes in this process; see ``load_beside``.

    Raises:
        ConfigurationError: they cannot be loaded; says why.
    """
    check_files(config)
    with reading(f"load the model at {config.model_path}", about=config.model_path):
        return _load_layers(config, layers, shards, torch.float32)


def _load_layers(
    config: TargetConfig, layers: range, shards: StageRanks | None, made_in: torch.dtype | None = None
) -> PreTrainedModel:
    with making_a_model():
        model: PreTrainedModel = weights_on_meta(lambda: _made_anew(config, made_in))
    parts, folder = _parts_of(model, config), Path(config.model_path)
    with WeightFiles(folder) as files:
        # A name that the model does not have is often a weight in another layout.
        _check_names(model, JoinedWeights(files, model, model.state_dict().keys()).names, config)
    try:
        parts.keep(layers)
    except AttributeError as error:
        named = "the types of its layers follow from other settings"
        raise _not_split(config, f"{type(model).__name__} cannot be split, {named}") from error
    if shards is not None:
        shards.cuts = cut_layers(model, shards)
    _read(model, config, LayerNames.of(model, layers), _WHOLE if shards is None else shards.cuts)
    refuse_nonsense(model, folder)
    hollow = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if hollow:
        raise _not_split(config, f"{type(model).__name__} cannot be split, {hollow[0]} is not stored")
    # What is loaded beside another model is made as that was.
    if layers.start and made_in is None:
        _check_passes_through(parts, config)
    _round(model, config, layers)
    if shards is not None:
        gather_between(model, shards)
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


def _parts_of(model: PreTrainedModel, config: TargetConfig) -> DecoderParts:
    """The parts that stages share out.

    Raises:
        ConfigurationError: the model has others.
    """
    try:
        return DecoderParts.of(model)
    except NotImplementedError as error:
        raise _not_split(config, f"{type(model).__name__} cannot be split: {error}; use stages: 1") from error


def _not_split(config: TargetConfig, why: str) -> ConfigurationError:
    field = "stages" if config.stages > 1 or config.tensor_parallel_size == 1 else "tensor_parallel_size"
    return ConfigurationError(why, field=f"verifier.{field}", value=getattr(config, field))


def _made_anew(config: TargetConfig, made_in: torch.dtype | None = None) -> PreTrainedModel:
    """The model by its configuration, whose attention is ours."""
    attention.register()
    adapters.register()
    found = read_config(config)
    try:
        made: PreTrainedModel = AutoModelForCausalLM.from_config(
            found, dtype=made_in or load_dtype(config), attn_implementation=attention.NAME
        )
    except KeyError as error:
        if error.args != (attention.NAME,):
            raise
        raise NotImplementedError(
            f"models of the type {found.model_type} compute attention by classes of their own, not through "
            "transformers' attention interface"
        ) from error
    return made


def hollow_model(config: TargetConfig, made_in: torch.dtype | None = None) -> PreTrainedModel:
    """The whole model without weights.

    Args:
        made_in: its type; None: that of the weights. float32 does for names and sizes, and changes nothing that all threads
            share (see ``load_beside``).
    """
    with reading(f"load the model at {config.model_path}", about=config.model_path), making_a_model(), torch.device("meta"):
        return _made_anew(config, made_in)


def _round(model: PreTrainedModel, config: TargetConfig, layers: range | None = None) -> None:
    if rounds(config):
        round_entering(model, config, hollow_model(config, torch.float32), layers)


def _read(
    model: PreTrainedModel, config: TargetConfig, names: LayerNames | None = None, cuts: Mapping[str, Cut] = _WHOLE
) -> None:
    wanted = WantedWeights(
        folder=Path(config.model_path), target=config.shared_with, dtype=load_dtype(config), stored=keeps_stored(config),
        names=names, cuts=cuts,
    )  # fmt: skip
    read_weights(model, wanted)


@torch.inference_mode()
def _check_passes_through(parts: DecoderParts, config: TargetConfig) -> None:
    """Check that what a stage is handed enters its layers unchanged, and leaves them so: some models scale it before.

    Raises:
        ConfigurationError: it does not.
    """
    model, width = parts.model, parts.model.config.get_text_config().hidden_size
    given = torch.randn(1, 2, width, dtype=load_dtype(config))
    with parts.without_layers():
        made = parts.decoder(inputs_embeds=given, **inputs_of(parts.decoder, torch.arange(2)[None]), use_cache=False)
    if not torch.equal(made.last_hidden_state, given):
        raise _not_split(
            config, f"{type(model).__name__} cannot be split: it changes what enters its first layer; use stages: 1"
        )
