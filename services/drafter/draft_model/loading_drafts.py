"""Loads a draft model from a local folder: safetensors alone, whole, finite, no code of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging as messages

from services.model_folder import read_json, reading
from speculation.errors import ConfigurationError

_DTYPES = ("float32", "float16", "bfloat16")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def load_draft_model(folder: Path, *, device: str, dtype: str) -> PreTrainedModel:
    """The model in ``folder``, ready to be run.

    Raises:
        ConfigurationError: the folder, the device or the type is wrong, or a weight is missing, superfluous, misshapen or
            not finite; says which.
    """
    _check_folder(folder)
    if dtype not in _DTYPES:
        raise ConfigurationError(f"dtype of draft models is {dtype}: must be one of {', '.join(_DTYPES)}")
    read_json(folder / "config.json", "draft model")
    with _quietly(), reading(f"load the draft model at {folder}"):
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            generation_config=GenerationConfig(),
        )
    _check_whole(folder, info["missing_keys"], "its files hold no {}")
    _check_whole(folder, [each[0] for each in info["mismatched_keys"]], "{} has another shape than config.json says")
    _check_whole(folder, info["unexpected_keys"], "its files hold {}, for which config.json has no place")
    loaded: PreTrainedModel = model
    for name, parameter in loaded.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ConfigurationError(f"cannot load the draft model at {folder}: {name} holds infinite values or NaN")
    with reading(f"move the draft model at {folder} to the device {device}"):
        loaded.to(device)
    loaded.eval().requires_grad_(False)
    return loaded


@contextmanager
def _quietly() -> Iterator[None]:
    """Transformers prints progress, and as a table what our errors say in one line."""
    level, bars = messages.get_verbosity(), messages.is_progress_bar_enabled()
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    try:
        yield
    finally:
        messages.set_verbosity(level)
        if bars:
            messages.enable_progress_bar()


def _check_folder(folder: Path) -> None:
    refused = f"cannot load the draft model at {folder}:"
    if not folder.is_dir():
        raise ConfigurationError(f"{refused} must be a folder with a draft model's config.json and safetensors")
    weights = [path.name for path in folder.glob("*.safetensors") if path.name != "vocabulary.safetensors"]
    if weights == ["blocks.safetensors"]:
        raise ConfigurationError(
            f"{refused} its weights are GGUF blocks, which only a target is served from; a draft model needs safetensors of "
            "float32, float16 or bfloat16"
        )
    if weights:
        return
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        raise ConfigurationError(
            f"{refused} {pickled[0]} is a pickle, which can run any code; convert it to safetensors first "
            "(`outrider train convert`)"
        )
    raise ConfigurationError(f"{refused} it holds no *.safetensors")


def _check_whole(folder: Path, names: Collection[str], what: str) -> None:
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ConfigurationError(f"cannot load the draft model at {folder}: {what.format(min(names) + others)}")
