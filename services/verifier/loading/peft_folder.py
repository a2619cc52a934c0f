"""Reads a LoRA adapter in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from services.model_files.folder import reading
from services.model_files.peft_config import CONFIG, WEIGHTS, PeftConfig, read_peft_config, weights_file
from services.model_files.weights.described import FLOATS
from services.model_files.weights.files import WeightFiles, is_whole_float
from services.model_files.weights.headers import read_header
from services.verifier.kernels.native.low_rank_kernel import LowRank
from speculation.errors import ConfigurationError

# In front of a module's name in the base model. Some adapters are published without it.
_PREFIX = "base_model.model."
# Behind it: of a linear layer's product, of an embedding's, and of the layer's own weight.
_OF_LINEAR = (".lora_A.weight", ".lora_B.weight")
_OF_EMBEDDING = (".lora_embedding_A", ".lora_embedding_B")
_OWN = ".base_layer.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptableLayer:
    """A layer of the served model that may be adapted.

    Attributes:
        inputs: the tokens, of an embedding.
        tied_to: the embedding whose weight the layer shares; empty: it has its own.
    """

    inputs: int
    outputs: int
    is_embedding: bool = False
    tied_to: str = ""

    @property
    def parts(self) -> tuple[str, str]:
        """What PEFT calls the two parts of its product."""
        return _OF_EMBEDDING if self.is_embedding else _OF_LINEAR


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredAdapter:
    """An adapter, as it was read.

    Attributes:
        where: its folder.
        digest: SHA-256 of what changes its products: its weights and its configuration.
        products: by the name of the base model's layer, as stored. ``down`` of an embedding has a column for each token.
    """

    where: str
    digest: str
    products: Mapping[str, LowRank]


def read_adapter(folder: Path, layers: Mapping[str, AdaptableLayer], base: Path | None) -> StoredAdapter:
    """The adapter in ``folder``, for the model in ``base``, which has these layers; None: it is known to be for that model.

    Raises:
        ConfigurationError: a file is missing or damaged, the adapter is for another model, or it asks for what is not
            computed here; names the field or the tensor.
    """
    config, file = read_peft_config(folder), weights_file(folder)
    header = read_header(file)
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in header) else ""
    modules = _modules(header, prefix, folder)
    products: dict[str, LowRank] = {}
    with reading(f"load the adapter at {folder}", about=folder), safe_open(file, "pt") as tensors:
        for module, parts in modules:
            down, up = (tensors.get_tensor(f"{prefix}{module}{part}") for part in parts)
            products[module] = LowRank(down=down, up=up, scale=config.scale_of(module))
            _check(module, parts, products[module], config, layers, folder)
        _check_complete(products, config, layers, folder)
        own = {module: f"{prefix}{module}{_OWN}" for module in products}
        held = {module: tensors.get_tensor(name) for module, name in own.items() if name in header}
    for module, product in products.items():
        if not torch.isfinite(product.down).all() or not torch.isfinite(product.up).all():
            raise _refused(folder, f"{module} holds infinite values or NaN: fetch the files again")
    if config.ties_embeddings:
        _check_tied(products, layers, folder)
    if base is not None:
        _check_own_weights(held, layers, base, folder)
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    with file.open("rb") as content:
        digest.update(hashlib.file_digest(content, "sha256").digest())
    return StoredAdapter(where=str(folder), digest=digest.hexdigest(), products=products)


def _modules(header: Mapping[str, object], prefix: str, folder: Path) -> list[tuple[str, tuple[str, str]]]:
    """Names of the modules that have both parts of a product, and the parts; anything else in the file is refused."""
    found = [
        (name.removeprefix(prefix).removesuffix(parts[0]), parts)
        for parts in (_OF_LINEAR, _OF_EMBEDDING)
        for name in sorted(header)
        if name.endswith(parts[0])
    ]
    wanted = {f"{prefix}{module}{part}" for module, parts in found for part in parts}
    if unknown := sorted(header.keys() - wanted - {f"{prefix}{module}{_OWN}" for module, _ in found}):
        kinds = ", or ".join(" and ".join(f"NAME{part}" for part in parts) for parts in (_OF_LINEAR, _OF_EMBEDDING))
        raise ConfigurationError(
            place=f"cannot load the adapter at {folder}",
            field=f"the tensor {unknown[0]}",
            allowed=f"{kinds}, behind {_PREFIX}: adapters of linear layers and of embeddings are served",
        )
    if missing := sorted(wanted - header.keys()):
        raise _refused(folder, f"{WEIGHTS} holds no {missing[0]}: fetch the files again")
    if not found:
        raise _refused(folder, f"{WEIGHTS} holds no tensors")
    return found


def _check(
    module: str,
    parts: tuple[str, str],
    product: LowRank,
    config: PeftConfig,
    layers: Mapping[str, AdaptableLayer],
    folder: Path,
) -> None:
    """Check a product against the configuration and the model."""
    layer, down, up = layers.get(module), product.down, product.up
    if layer is None or layer.parts != parts:
        kind = "embedding" if parts == _OF_EMBEDDING else "linear layer"
        raise _refused(folder, f"it adapts {module}, and the served model has no {kind} of that name that takes all rows")
    if not all(is_whole_float(each) for each in (down, up)):
        raise _refused(folder, f"{module} is stored as {down.dtype} and {up.dtype}: {', '.join(FLOATS)} are read")
    rank, inputs = config.rank_of(module), "tokens" if layer.is_embedding else "inputs"
    sizes = (rank, layer.inputs), (layer.outputs, rank)
    for name, found, wanted in zip(parts, (down.shape, up.shape), sizes, strict=True):
        if tuple(found) != wanted:
            why = f"rank {rank} in {CONFIG}, and {layer.inputs} {inputs} and {layer.outputs} outputs of the served model"
            raise _refused(folder, f"{module}{name} is {tuple(found)}, and must be {wanted}, by {why}")


def _check_tied(products: Mapping[str, LowRank], layers: Mapping[str, AdaptableLayer], folder: Path) -> None:
    """Check that layers which share an embedding's weight have its product as well, transposed."""
    for module, layer in layers.items():
        of_embedding, own = products.get(layer.tied_to), products.get(module)
        if of_embedding is None:
            continue
        if own is None or not (torch.equal(own.down, of_embedding.up.T) and torch.equal(own.up, of_embedding.down.T)):
            raise ConfigurationError(
                place=f"cannot load the adapter at {folder}",
                field="ensure_weight_tying",
                value="true",
                allowed=f"false, or with {module} adapted as {layer.tied_to} is, transposed, as PEFT writes it",
            )


def _check_own_weights(
    held: Mapping[str, torch.Tensor], layers: Mapping[str, AdaptableLayer], base: Path, folder: Path
) -> None:
    """Check that the weights of whole layers which PEFT writes beside a product are those of the served model."""
    if not held:
        return
    with WeightFiles(base) as files:
        for module, weight in held.items():
            own = f"{layers[module].tied_to or module}.weight"
            # Whoever trained the adapter may have read the base model in another type than that of its files.
            if own not in files or not torch.equal(files.numbers(own).to(weight.dtype), weight):
                raise ConfigurationError(
                    place=f"cannot load the adapter at {folder}",
                    field=f"the tensor {_PREFIX}{module}{_OWN}",
                    allowed=f"left out (save_embedding_layers=False), or equal to {own} of {base}, whose weights are served",
                )


def _check_complete(found: Mapping[str, object], config: PeftConfig, layers: Iterable[str], folder: Path) -> None:
    """Check that what ``target_modules`` names of the model is in the file."""
    missing = [module for module in layers if config.adapts(module) and module not in found]
    if missing:
        others = f", nor {len(missing) - 1} others" if len(missing) > 1 else ""
        raise _refused(
            folder,
            f"target_modules in {CONFIG} names {missing[0]}, of which {WEIGHTS} holds nothing{others}: fetch it again",
        )


def _refused(folder: Path, why: str) -> ConfigurationError:
    return ConfigurationError(f"cannot load the adapter at {folder}: {why}", about=folder)
