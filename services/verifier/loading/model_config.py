"""A model's configuration, checked, and the type in which its weights are loaded."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig

from services.model_files.folder import reading
from services.model_files.weights.for_transformers import without_quantisation
from services.model_files.weights.headers import check_weights
from services.verifier.config import TargetConfig
from services.verifier.loading.memory import arithmetic_dtype
from services.verifier.loading.refusals import check_config, refuse_unsupported
from speculation.errors import ConfigurationError


def load_dtype(config: TargetConfig) -> torch.dtype:
    """The type in which weights are loaded; those that become int8 on a CPU are loaded in their stored type.

    On a GPU torchao multiplies in the type that it has quantised from, and our kernels in bfloat16.
    """
    if config.dtype == "int8" and config.device == "cpu":
        return read_config(config).dtype or torch.float32
    return arithmetic_dtype(config)


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
    return without_quantisation(found)


def longest_request(config: TargetConfig, model_config: object) -> int:
    """Most tokens of a request, as far as the settings and the model say.

    Raises:
        ConfigurationError: ``max_model_len`` is more than the model was made for, or than the KV cache holds.
    """
    native = int(getattr(model_config, "max_position_embeddings", config.cache_tokens))
    most = native if config.sized_by_gpu else min(native, config.cache_tokens)
    wanted = config.max_model_len or most
    if wanted > native:
        raise ConfigurationError(
            f"the model was made for at most {native} tokens", field="verifier.max_model_len", value=wanted
        )
    if wanted > most:
        raise ConfigurationError(
            f"verifier.kv_cache_tokens, {config.cache_tokens}, must not be below it",
            field="verifier.max_model_len",
            value=wanted,
        )
    return wanted
