"""How much memory a model takes, before it is loaded: found by a pass over a few rows of it without weights."""

from __future__ import annotations

import ipaddress
import logging
import math
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from services.model_files.weights.headers import BLOCKS_FILE, check_weights
from services.model_files.weights.quantised.method import format_of
from services.verifier.attention.recording import record
from services.verifier.config import TargetConfig
from services.verifier.kernels.experts import chosen_by_row, use_noting
from services.verifier.kernels.triton.pass_shape import summed
from services.verifier.loading import adapters
from services.verifier.loading.cut_layers import gathers_of, uncut_of
from services.verifier.loading.decoder_parts import DecoderParts
from services.verifier.loading.hollow import ByShapes
from services.verifier.loading.load_model import (
    has_own_names,
    hollow_model,
    keeps_experts,
    keeps_stored,
    stored_in_halves,
)
from services.verifier.loading.memory import Shape, available_bytes, with_cache_of
from services.verifier.loading.part_sizes import Mixture, SteppedRows
from services.verifier.loading.refusals import check_config
from services.verifier.model.gpu_here import multiplies_fp8
from services.verifier.recurrence import functions

log = logging.getLogger(__name__)


def check_memory(config: TargetConfig, least: int) -> tuple[TargetConfig, Shape]:
    """Check that the configured model fits into memory.

    Args:
        least: tokens that its KV cache must hold.

    Returns:
        ``config`` with the tokens that it holds, and what the model's size depends on.

    Raises:
        ConfigurationError: it does not; says what would fit.
    """
    device = torch.device(config.device)
    # Stages connected over loopback share this machine, though not a GPU.
    shared = config.device == "cpu" and ipaddress.ip_address(config.stage_host).is_loopback
    free = available_bytes(config) / (config.processes if shared else 1)
    shape = shape_of(config)
    # Our kernels need no units for it.
    fp8 = device.type == "cuda" and (config.kernels != "torch" or multiplies_fp8(device))
    return with_cache_of(config, shape, free, least=least, fp8=fp8), shape


def shape_of(config: TargetConfig) -> Shape:
    """What the model's size depends on.

    Raises:
        ConfigurationError: there is no such model.
    """
    skeleton = hollow_model(config)
    held = _held_values(skeleton, config)
    text = skeleton.config.get_text_config()
    # Where the list of layers is not known, all parameters count as outside of layers.
    layers = nn.ModuleList()
    with suppress(NotImplementedError):
        layers = DecoderParts.of(skeleton).layers
    embeddings = text.vocab_size * text.hidden_size
    total = sum(parameter.numel() for parameter in skeleton.parameters())
    uses = Counter(parameter for layer in layers for parameter in layer.parameters())
    in_layers = sum(parameter.numel() for parameter in uses)
    shared = sum(parameter.numel() for parameter, count in uses.items() if count > 1)
    return Shape(
        layers=max(1, len(layers)),
        per_layer=(in_layers - shared) // max(1, len(layers)),
        # A tied output layer is packed separately from the embeddings.
        others=total - in_layers + (embeddings if text.tie_word_embeddings else 0),
        embeddings=embeddings,
        stored_bytes=(skeleton.config.dtype or torch.float32).itemsize,
        cache_values_per_token=held.per_token,
        cache_rows_per_token=held.rows,
        state_values_per_request=held.of_states,
        kept_bytes=_kept_bytes(config, total),
        kv_heads=text.to_dict().get("num_key_value_heads") or 0,
        gathers=gathers_of(skeleton),
        vocabulary=text.vocab_size,
        summed=held.summed,
        longest=text.to_dict().get("max_position_embeddings") or 0,
        mixtures=_mixtures(skeleton),
        stepped=held.stepped,
        shared=shared,
        again=sum(parameter.numel() * (count - 1) for parameter, count in uses.items()),
        # Last, since it cuts the skeleton.
        uncut=uncut_of(skeleton),
    )


def _mixtures(skeleton: nn.Module) -> tuple[Mixture, ...]:
    """Experts that have noted how many of them a row chooses; all others count as read in every pass."""
    found: Counter[tuple[int, int]] = Counter()
    for module in skeleton.modules():
        if (chosen := chosen_by_row(module)) is not None:
            experts = module.get_parameter("down_proj").shape[0]
            found[experts, chosen] += sum(parameter.numel() for parameter in module.parameters())
    return tuple(
        Mixture(parameters=parameters, experts=experts, chosen=chosen) for (experts, chosen), parameters in found.items()
    )


def _kept_bytes(config: TargetConfig, parameters: int) -> float | None:
    """Bytes per parameter in the files, if linear layers keep their weights as stored; otherwise None."""
    folder = Path(config.model_path)
    if not keeps_stored(config):
        return None
    quantised = format_of(folder) is not None and (has_own_names(config) or keeps_experts(config))
    if not (quantised or (folder / BLOCKS_FILE).is_file() or stored_in_halves(config)):
        return None
    tensors = check_weights(folder, check_config(folder))
    return sum(tensor.numbers * tensor.bytes_as_stored for tensor in tensors.values()) / parameters


class _Held(NamedTuple):
    """Numbers, and rows of heads, per token in the key-value pool; numbers per request in states; see ``Shape``."""

    per_token: int
    rows: int = 0
    of_states: int = 0
    summed: int = 0
    stepped: SteppedRows = SteppedRows()


def _held_values(skeleton: PreTrainedModel, config: TargetConfig) -> _Held:
    """What is held of a model's tokens and requests.

    Of each attention call the pool has keys, values and a column of ones. A few architectures cannot run without weights.
    For those the result is an estimate: as many key-value heads as query heads, and no states.
    """
    text = skeleton.config.get_text_config()
    adapters.install(skeleton, config.cache_tokens, skeleton.device)
    functions.install(skeleton)
    use_noting(skeleton)
    try:
        tokens = torch.ones(1, 8, dtype=torch.int64, device=skeleton.device)
        with ByShapes():
            recorded = record(skeleton, tokens, None)
    except (NotImplementedError, RuntimeError, TypeError, AttributeError) as error:
        log.info("the cache's size is estimated: %s", error)
        return _Held(2 * int(text.num_hidden_layers) * int(text.hidden_size))
    calls = [call for own in recorded.calls.values() for call in own]
    per_token = sum(call.kv_heads * (call.key_size + call.value_size + 1) for call in calls)
    of_states = sum(math.prod(shape) for shape in recorded.state_shapes)
    rows, most_summed = sum(call.kv_heads for call in calls), max((summed(call) for call in calls), default=0)
    return _Held(per_token, rows, of_states, most_summed, recorded.stepped)
