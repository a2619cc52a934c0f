"""Reads a LoRA adapter in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from services.model_files.folder import reading
from services.model_files.peft_config import CONFIG, PeftConfig, read_peft_config
from services.model_files.weights.described import FLOATS
from services.model_files.weights.headers import read_header
from services.verifier.kernels.native.low_rank_kernel import LowRank
from speculation.errors import ConfigurationError

WEIGHTS = "adapter_model.safetensors"
# In front of a module's name in the base model.
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"

# Inputs and outputs of a linear layer.
Sizes = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredAdapter:
    """An adapter, as it was read.

    Attributes:
        where: its folder.
        digest: SHA-256 of what changes its products: its weights and its configuration.
        products: by the name of the base model's linear layer, as stored.
    """

    where: str
    digest: str
    products: Mapping[str, LowRank]


def read_adapter(folder: Path, linears: Mapping[str, Sizes]) -> StoredAdapter:
    """The adapter in ``folder``, for a model with these linear layers.

    Raises:
        ConfigurationError: a file is missing or damaged, the adapter is for another model, or it asks for what is not
            computed here; names the field or the tensor.
    """
    config, file = read_peft_config(folder), folder / WEIGHTS
    if not file.is_file():
        raise ConfigurationError(f"cannot load the adapter at {folder}: no {WEIGHTS} there", about=folder)
    header = read_header(file)
    modules = _modules(header, folder)
    products: dict[str, LowRank] = {}
    with reading(f"load the adapter at {folder}", about=folder), safe_open(file, "pt") as tensors:
        for module in modules:
            down, up = (tensors.get_tensor(f"{_PREFIX}{module}{part}") for part in (_DOWN, _UP))
            _check(module, down, up, config, linears, folder)
            products[module] = LowRank(down=down, up=up, scale=config.scale_of(module))
        _check_complete(products, config, linears, folder)
    for module, product in products.items():
        if not torch.isfinite(product.down).all() or not torch.isfinite(product.up).all():
            raise _refused(folder, f"{module} holds infinite values or NaN: fetch the files again")
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    with file.open("rb") as content:
        digest.update(hashlib.file_digest(content, "sha256").digest())
    return StoredAdapter(where=str(folder), digest=digest.hexdigest(), products=products)


def _modules(header: Mapping[str, object], folder: Path) -> list[str]:
    """Names of the modules that have both parts of a product; anything else in the file is refused."""
    found = {name.removeprefix(_PREFIX).removesuffix(_DOWN) for name in header if name.endswith(_DOWN)}
    wanted = {f"{_PREFIX}{module}{part}" for module in found for part in (_DOWN, _UP)}
    if unknown := sorted(header.keys() - wanted):
        raise ConfigurationError(
            place=f"cannot load the adapter at {folder}",
            field=f"the tensor {unknown[0]}",
            allowed=f"{_PREFIX}NAME{_DOWN} or {_PREFIX}NAME{_UP}, both of them: adapters of linear layers are served",
        )
    if missing := sorted(wanted - header.keys()):
        raise _refused(folder, f"{WEIGHTS} holds no {missing[0]}: fetch the files again")
    if not found:
        raise _refused(folder, f"{WEIGHTS} holds no tensors")
    return sorted(found)


def _check(
    module: str, down: torch.Tensor, up: torch.Tensor, config: PeftConfig, linears: Mapping[str, Sizes], folder: Path
) -> None:
    """Check a product against the configuration and the model."""
    if module not in linears:
        raise _refused(
            folder, f"it adapts {module}, and the served model has no linear layer of that name that takes all rows"
        )
    if not down.is_floating_point() or not up.is_floating_point():
        raise _refused(folder, f"{module} is stored as {down.dtype} and {up.dtype}: {', '.join(FLOATS)} are read")
    inputs, outputs = linears[module]
    rank = config.rank_of(module)
    for name, found, wanted in ((_DOWN, down.shape, (rank, inputs)), (_UP, up.shape, (outputs, rank))):
        if tuple(found) != wanted:
            why = f"rank {rank} in {CONFIG}, and {inputs} inputs and {outputs} outputs of the served model"
            raise _refused(folder, f"{module}{name} is {tuple(found)}, and must be {wanted}, by {why}")


def _check_complete(found: Mapping[str, object], config: PeftConfig, linears: Mapping[str, Sizes], folder: Path) -> None:
    """Check that what ``target_modules`` names of the model is in the file."""
    missing = [module for module in linears if config.adapts(module) and module not in found]
    if missing:
        others = f", nor {len(missing) - 1} others" if len(missing) > 1 else ""
        raise _refused(
            folder,
            f"target_modules in {CONFIG} names {missing[0]}, of which {WEIGHTS} holds nothing{others}: fetch it again",
        )


def _refused(folder: Path, why: str) -> ConfigurationError:
    return ConfigurationError(f"cannot load the adapter at {folder}: {why}", about=folder)
