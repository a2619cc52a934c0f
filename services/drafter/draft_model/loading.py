"""Loads a draft model from a local folder: safetensors alone, whole, finite, no code of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging as messages

from services.drafter.draft_model.vocabulary_map import VOCABULARY_FILE
from services.model_files.folder import read_json, reading
from services.model_files.weights.files import WeightFiles
from services.model_files.weights.for_transformers import from_pretrained, making_a_model, without_quantisation
from services.model_files.weights.headers import BLOCKS_FILE
from services.model_files.weights.quantised.method import format_of
from services.model_files.weights.rounded_inputs import round_inputs
from services.model_files.weights.shared import read_shared
from speculation.errors import ConfigurationError

_DTYPES = ("float32", "float16", "bfloat16")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def load_draft_model(folder: Path, target: Path, *, device: str, dtype: str) -> PreTrainedModel:
    """The model in ``folder``, ready to be run.

    Args:
        target: folder of the model with which it may share weights.

    Raises:
        ConfigurationError: the folder, the device or the type is wrong, or a weight is missing, superfluous, misshapen or
            not finite; says which.
    """
    check_folder(folder)
    if dtype not in _DTYPES:
        raise ConfigurationError(field="dtype of draft models", value=dtype, allowed=f"one of {', '.join(_DTYPES)}")
    read_json(folder / "config.json", "draft model")
    with quietly(), reading(f"load the draft model at {folder}", about=folder), making_a_model(), ExitStack() as stack:
        model, info = _read(folder, target, stack)(
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
    stored = format_of(folder)
    if stored is not None and stored.entering:
        with reading(f"load the draft model at {folder}", about=folder), WeightFiles(folder) as files:
            round_inputs(loaded, files.roundings)
    for name, parameter in loaded.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ConfigurationError(
                f"cannot load the draft model at {folder}: {name} holds infinite values or NaN", about=folder
            )
    with reading(f"move the draft model at {folder} to the device {device}", about=folder):
        loaded.to(device)
    loaded.eval().requires_grad_(False)
    return loaded


class _Quiet:
    """Keeps transformers quiet while any thread wants it to be."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._before = (messages.get_verbosity(), messages.is_progress_bar_enabled())

    def begin(self) -> None:
        with self._lock:
            if not self._wanted:
                self._before = (messages.get_verbosity(), messages.is_progress_bar_enabled())
                messages.set_verbosity_error()
                messages.disable_progress_bar()
            self._wanted += 1

    def end(self) -> None:
        with self._lock:
            self._wanted -= 1
            if self._wanted:
                return
            level, bars = self._before
            messages.set_verbosity(level)
            if bars:
                messages.enable_progress_bar()


_QUIET = _Quiet()


@contextmanager
def quietly() -> Iterator[None]:
    """Transformers prints progress, and as a table what our errors say in one line."""
    _QUIET.begin()
    try:
        yield
    finally:
        _QUIET.end()


def _read(folder: Path, target: Path, stack: ExitStack) -> Callable[..., Any]:
    """``from_pretrained`` with the folder's weights; transformers gets those that it cannot read by itself."""
    if not (folder / BLOCKS_FILE).is_file() and read_shared(folder) is None and format_of(folder) is None:
        return partial(AutoModelForCausalLM.from_pretrained, folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return from_pretrained(without_quantisation(config), stack.enter_context(WeightFiles(folder, target)))


def check_folder(folder: Path) -> None:
    """Check that a folder may hold a draft model.

    Raises:
        ConfigurationError: it is no folder, or its weights are no safetensors.
    """
    refused = f"cannot load the draft model at {folder}:"
    if not folder.is_dir():
        raise ConfigurationError(
            f"{refused} must be a folder with a draft model's config.json and safetensors", about=folder
        )
    if any(path.name != VOCABULARY_FILE for path in folder.glob("*.safetensors")):
        return
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        raise ConfigurationError(
            f"{refused} {pickled[0]} is a pickle, which can run any code; convert it to safetensors first "
            "(`outrider train convert`)",
            about=folder,
        )
    raise ConfigurationError(f"{refused} it holds no *.safetensors", about=folder)


def _check_whole(folder: Path, names: Collection[str], what: str) -> None:
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ConfigurationError(
            f"cannot load the draft model at {folder}: {what.format(min(names) + others)}", about=folder
        )
