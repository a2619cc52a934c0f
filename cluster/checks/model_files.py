"""Checks memory and context length by headers of a model's files, and adapters by their configurations, without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.models.target import ResolvedModel
from cluster.settings import component_configs
from cluster.settings.components import VerifierSettings
from cluster.settings.config import Settings
from services.model_files.folder import read_json, reading, text_config
from services.model_files.peft_config import read_peft_config
from services.model_files.weights.described import BLOCKS, Tensor
from services.model_files.weights.headers import check_weights
from services.model_files.weights.quantised.method import format_of
from speculation.adapters import check_name
from speculation.errors import ConfigurationError, InvalidArgument

_GIB = 2**30
_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")

# Tokens of the smallest pool.
_BLOCK = 64
_EXPERTS = ".experts."


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """The weights in a model's files.

    Attributes:
        in_layers: numbers in the model's layers.
        others: numbers outside of them.
        stored: bytes per number, the largest in any tensor; 1 for blocks of a few bits.
    """

    in_layers: int
    others: int
    stored: int


def count_weights(tensors: Mapping[str, Tensor]) -> Weights:
    """Count the numbers in all tensors. In files with blocks of a few bits, bytes are counted instead."""
    blocks = any(tensor.dtype in ("U8", *BLOCKS) for tensor in tensors.values())
    sizes = {name: int(tensor.numbers * (tensor.bytes_each if blocks else 1)) for name, tensor in tensors.items()}
    in_layers = sum(size for name, size in sizes.items() if _LAYER.search(name))
    return Weights(
        in_layers=in_layers,
        others=sum(sizes.values()) - in_layers,
        stored=1 if blocks else max((int(tensor.bytes_each) for tensor in tensors.values()), default=1),
    )


def expanded(verifier: VerifierSettings, folder: Path) -> str:
    """What a quantised checkpoint becomes when it is loaded, in words; empty where the weights are stored as numbers.

    Raises:
        ConfigurationError: its files cannot be read.
    """
    stored = format_of(folder)
    if stored is None:
        return ""
    with reading(f"load the model at {folder}", about=folder):
        tensors = check_weights(folder, read_json(folder / "config.json"))
    kept = verifier.dtype == "float32" and verifier.device == "cpu" and verifier.weights != "float32"
    sizes = [each.numbers * (each.bytes_as_stored if kept else _BYTES[verifier.dtype]) for each in tensors.values()]
    types = sorted({each.dtype for each in tensors.values() if each.dtype in (*BLOCKS, "BF16")}) if kept else []
    layers = "linear layers and experts" if any(_EXPERTS in name for name in tensors) else "linear layers"
    multiplied = f", {layers} multiplied as {' and '.join(types)} where that is faster" if types else ""
    return (
        f"{stored.name}: the numbers that it stands for take {sum(sizes) / 2**20:,.0f} MiB in {verifier.dtype}{multiplied}; "
        f"what enters a layer is {f'rounded to {stored.entering}' if stored.entering else 'not rounded'}"
    )


def check_lengths(verifier: VerifierSettings, config: dict[str, Any]) -> None:
    """Check the longest request.

    Raises:
        ConfigurationError: it is longer than the model's context or than the key-value pool.
    """
    wanted, most = verifier.max_model_len, text_config(config).get("max_position_embeddings")
    if wanted is not None and isinstance(most, int) and wanted > most:
        raise ConfigurationError(
            f"the model was made for at most {most} tokens", field="verifier.max_model_len", value=wanted
        )
    tokens = verifier.known_cache_tokens
    if wanted is not None and tokens is not None and wanted > tokens:
        raise ConfigurationError(
            f"verifier.kv_cache_tokens, {tokens}, must not be below it",
            field="verifier.max_model_len",
            value=wanted,
        )


def cache_bytes(verifier: VerifierSettings, config: dict[str, Any], tokens: int) -> float | None:
    """Bytes of a key-value pool of ``tokens`` over all stages; None if the configuration does not determine them."""
    text = text_config(config)
    try:
        heads = text["num_attention_heads"]
        size = text.get("head_dim") or text["hidden_size"] // heads
        rows = 2 * text["num_hidden_layers"] * (text.get("num_key_value_heads") or heads)
    except (KeyError, TypeError, ZeroDivisionError):
        return None
    exact = verifier.dtype == "float32" or (verifier.dtype == "int8" and verifier.device == "cpu")
    # A byte for each number, and a scale for each row.
    row = size * (4 if exact else 2) if verifier.kv_cache_dtype == "auto" else size + 4
    return float(rows * row * tokens)


def check_fits(
    verifier: VerifierSettings, config: dict[str, Any], weights: Weights, available: float, here: int, drafting: float = 0
) -> None:
    """Check that weights and cache can fit. The verifier, which counts exactly, may still refuse what passes here.

    Args:
        available: free bytes for all processes of the target on this machine together.
        here: number of these.
        drafting: bytes that models which draft take of it.

    Raises:
        ConfigurationError: they cannot fit; says what would.
    """
    known = verifier.known_cache_tokens
    # A GPU that says the size of the pool must hold one of the longest request, or of one block.
    tokens = known if known is not None else verifier.max_model_len or _BLOCK
    available *= 1.0 if known is not None else verifier.gpu_memory_utilization
    cache = cache_bytes(verifier, config, tokens)
    if cache is None:
        return
    # Weights stay as stored or are converted to verifier.dtype; the smaller of the two is a lower bound.
    parts, what = verifier.processes, "stages" if verifier.tensor_parallel_size == 1 else "processes"
    least = weights.in_layers / parts + weights.others / verifier.tensor_parallel_size
    held = least * min(_BYTES[verifier.dtype], weights.stored)
    taken, share = held + cache / parts, (available - drafting) / here
    if taken <= share:
        return
    beside = f" beside the models that draft, {drafting / _GIB:.1f} GiB (drafter.models)" if drafting else ""
    room = (share - held) / (cache / parts) * tokens
    fitting = 1 << max(0, int(room)).bit_length() - 1 if room >= _BLOCK else 0
    raise ConfigurationError(
        f"the model does not fit: at least {held / _GIB:.1f} GiB of weights and {cache / parts / _GIB:.1f} GiB of "
        f"cache (verifier.kv_cache_tokens: {tokens}) in each of {parts} {what}, "
        f"{max(0.0, share) / _GIB:.1f} GiB are free{beside}; "
        + (
            f"verifier.kv_cache_tokens: {fitting} would fit"
            if fitting
            else "use another dtype, more stages on other machines, or a smaller model"
        ),
        about="model",
    )


def check_adapters(settings: Settings, model: ResolvedModel, *, here: bool) -> None:
    """Check names, and where they lie ``here`` the folders of the adapters.

    Raises:
        ConfigurationError: a name is no name or the model's own, or a folder holds no adapter that can be served; says why.
    """
    own = component_configs.names_of(settings, model)
    for name, folder in settings.verifier.lora_modules.items():
        try:
            check_name(name, own)
        except InvalidArgument as error:
            raise ConfigurationError(field="verifier.lora_modules", value=name or '""', allowed=error.allowed) from error
        if here:
            read_peft_config(Path(folder).expanduser())
