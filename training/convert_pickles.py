"""Makes safetensors of a drafter's pickled weights, once, before it is ever served: the only place that opens a pickle.

A pickle can hold any program. With ``weights_only``, torch builds tensors and plain containers and nothing else; what comes
out must be tensors by name.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save

from services.drafter.draft_model.loading import load_draft_model
from services.drafter.heads.blocks.fields import is_block
from services.drafter.heads.blocks.files import load_blocks
from services.drafter.heads.files.head_files import CONFIG, load_head
from services.drafter.heads.files.kinds import is_language_model
from services.drafter.heads.files.pickled import PICKLED
from services.drafter.heads.files.target_shape import TRAINING
from services.drafter.heads.medusa.config import is_medusa
from services.drafter.heads.medusa.files import load_medusa
from services.model_files.folder import one_line, read_json, tokenizer_digest
from services.model_files.weights.headers import SINGLE
from speculation.errors import ConfigurationError
from speculation.files import write_whole

# A draft model's own, where it has one.
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)


def convert(
    folder: Path,
    out: Path | None = None,
    *,
    target: Path | None = None,
    layer_ids: Literal["hidden_states", "layers"] | None = None,
) -> Path:
    """Write model.safetensors, config.json and training.json for the pickled head or draft model in ``folder``.

    Args:
        out: folder to write to; None: beside the pickles, which are not opened again then.
        target: folder of the target: the drafter must load for it, and a head records its tokenizer. A draft model's own
            tokenizer is copied.
        layer_ids: how config.json counts EAGLE-3's layers, if that is known: as indices into transformers' ``hidden_states``
            (vLLM), or as layers (SpecForge, SGLang).

    Returns:
        The folder written.

    Raises:
        ConfigurationError: there is no pickle, or it holds anything but tensors, or the drafter does not suit the target;
            nothing is left behind then.
    """
    beside = out is None or out.resolve() == folder.resolve()
    out = folder if out is None or beside else out
    read_json(folder / CONFIG, of="head")
    files = _pickles(folder)
    copied = [] if beside else [name for name in (CONFIG, *_TOKENIZERS) if (folder / name).is_file()]
    for name in (SINGLE,) if beside else (SINGLE, TRAINING, *copied):
        if (out / name).exists():
            raise ConfigurationError(f"cannot convert the weights at {folder}: {out / name} is there already", about=folder)
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        for name, tensor in _tensors(file).items():
            if name in tensors:
                raise ConfigurationError(f"cannot convert the weights at {folder}: {name} is in two files", about=folder)
            # Tensors that share memory, as tied weights do, are written one by one.
            tensors[name] = tensor.clone().contiguous()
    recorded: dict[str, Any] = read_json(folder / TRAINING, of="head") if (folder / TRAINING).is_file() else {}
    recorded["converted_from"] = {file.name: _sha256(file) for file in files}
    if layer_ids is not None:
        recorded["layer_ids"] = layer_ids
    if target is not None and not is_language_model(tensors):
        recorded["tokenizer_sha256"] = tokenizer_digest(target)
    written = [SINGLE, TRAINING, *copied]
    before = (out / TRAINING).read_bytes() if (out / TRAINING).is_file() else None
    out.mkdir(parents=True, exist_ok=True)
    try:
        for name in copied:
            shutil.copyfile(folder / name, out / name)
        write_whole(out / TRAINING, json.dumps(recorded, indent=2).encode())
        write_whole(out / SINGLE, save(tensors, metadata={"format": "pt"}))
        if target is not None:
            _load(out, target, tensors)
    except BaseException:
        for name in written:
            (out / name).unlink(missing_ok=True)
        if before is not None:
            write_whole(out / TRAINING, before)
        raise
    return out


def _load(out: Path, target: Path, names: Iterable[str]) -> None:
    """Load a drafter once, as a server would."""
    names = list(names)
    if is_medusa(names):
        load_medusa(out, target)
    elif is_block(names):
        load_blocks(out, target)
    elif is_language_model(names):
        load_draft_model(out, target, device="cpu", dtype="float32")
    else:
        load_head(out, target)


def _pickles(folder: Path) -> list[Path]:
    found = sorted(file for file in folder.iterdir() if file.suffix in PICKLED and file.is_file())
    if not found:
        kinds = ", ".join(PICKLED)
        raise ConfigurationError(f"cannot convert the weights at {folder}: no pickled weights there ({kinds})", about=folder)
    return found


def _tensors(file: Path) -> Mapping[str, torch.Tensor]:
    """The tensors in one file, by name.

    Raises:
        ConfigurationError: it holds anything else, programs above all, or is damaged.
    """
    where = f"cannot convert {file}"
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # The exception's text is torch's advice to switch the check off.
        reason = "it holds more than tensors" if "weights_only" in str(error) else one_line(error)
        raise ConfigurationError(f"{where}: {reason}; only tensors by name are converted", about=file) from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping):
        raise ConfigurationError(
            f"{where}: it holds {type(content).__name__}; only tensors by name are converted", about=file
        )
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            kind = type(value).__name__
            raise ConfigurationError(f"{where}: {str(name)[:80]} is {kind}; only tensors by name are converted", about=file)
    return content


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
