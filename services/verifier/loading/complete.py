"""Checks that a loaded model is what its files hold: no weight invented, none left out, all of them finite."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from services.model_files.mtp_layers import find_mtp
from services.model_files.weights.stored_blocks import StoredLinear
from services.verifier.kernels.parameters import in_blocks
from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.\d+\.")
# Fields of configurations that say of which kind each layer is.
_KINDS = (
    "layer_types", "layers_block_type", "hybrid_override_pattern", "block_types", "attn_layer_indices", "attn_layer_period",
    "attn_layer_offset",
)  # fmt: skip


def refuse_incomplete(model: PreTrainedModel, info: Mapping[str, Any], folder: Path) -> None:
    """Refuse a model that transformers has loaded only in part.

    Args:
        info: the ``output_loading_info`` of ``from_pretrained``. It omits what the architecture declares as optional or
            superfluous: tied weights, and buffers that older versions stored.

    Raises:
        ConfigurationError: a weight would be random, has another shape, or is not used.
    """
    if info["missing_keys"]:
        raise missing(model, info["missing_keys"], folder, info["unexpected_keys"])
    if info["mismatched_keys"]:
        name, stored, wanted = min(info["mismatched_keys"])
        raise mismatched(name, stored, wanted, folder, len(info["mismatched_keys"]))
    if info["error_msgs"]:
        raise ConfigurationError(
            f"cannot load the model at {folder}: {' '.join(str(info['error_msgs'][0]).split())[:400]}", about=folder
        )
    refuse_unused(model, info["unexpected_keys"], folder)


def missing(
    model: PreTrainedModel, names: Collection[str], folder: Path, unused: Collection[str] = ()
) -> ConfigurationError:
    """The error for weights that no file holds.

    Args:
        unused: weights that the files hold instead.
    """
    return ConfigurationError(
        f"cannot load the model at {folder}: its files hold no {min(names)}{_and_others(len(names))}, which "
        f"{type(model).__name__} needs by its configuration{_of_other_kinds(model, names, unused)}: fetch the files again, "
        "or correct that",
        about=folder,
    )


def _of_other_kinds(model: PreTrainedModel, names: Collection[str], unused: Collection[str]) -> str:
    """By which fields the layers are of other kinds than in the files, where these hold others of the same layers."""
    lacking, held = ({found[0] for each in some if (found := _LAYER.search(each))} for some in (names, unused))
    said = [name for name in _KINDS if getattr(model.config, name, None) is not None] if lacking & held else []
    return f" ({', '.join(said)})" if said else ""


def mismatched(
    name: str, stored: Collection[int], wanted: Collection[int], folder: Path, count: int = 1
) -> ConfigurationError:
    """The error for a weight of another shape."""
    return ConfigurationError(
        f"cannot load the model at {folder}: {name} is {tuple(stored)}, its configuration says "
        f"{tuple(wanted)}{_and_others(count)}",
        about=folder,
    )


def refuse_unused(model: PreTrainedModel, names: Collection[str], folder: Path) -> None:
    """Refuse weights that belong to the model but have no place in it. Weights of other heads beside it, and of MTP layers,
    are harmless.

    Args:
        names: the weights that were not used.

    Raises:
        ConfigurationError: the configuration describes another model.
    """
    base: torch.nn.Module = getattr(model, model.base_model_prefix, model)
    parts = {name for name, _ in (*model.named_children(), *base.named_children())} | {model.base_model_prefix}
    harmless = re.compile("|".join((*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$")))
    ahead = find_mtp(names)
    others = set(names) - (ahead.every if ahead is not None else set())
    own = sorted(name for name in others if name.partition(".")[0] in parts and not harmless.search(name))
    if own:
        raise ConfigurationError(
            f"cannot load the model at {folder}: its files hold {own[0]}{_and_others(len(own))}, for which "
            f"{type(model).__name__} has no place by its configuration: without them it would be another model",
            about=folder,
        )
    if names:
        log.info("weights not used: %s%s", min(names), _and_others(len(names)))


def refuse_nonsense(model: PreTrainedModel, folder: Path) -> None:
    """Refuse infinite weights and NaN, which damaged files contain.

    Raises:
        ConfigurationError: names the weight.
    """
    for name, parameter in model.named_parameters():
        # Quick test first: the sum is not finite if a weight is not. Finite weights may overflow it, so the rest is checked.
        if parameter.is_floating_point() and not torch.isfinite(parameter.sum()) and not torch.isfinite(parameter).all():
            raise _nonsense(name, folder)
    for name, module in model.named_modules():
        if isinstance(module, StoredLinear) and not module.weight.finite():
            raise _nonsense(f"{name}.weight", folder)
        for own, blocks in in_blocks(module):
            if not blocks.finite():
                raise _nonsense(f"{name}.{own}", folder)


@contextmanager
def without_report() -> Iterator[None]:
    """Keep transformers from printing its table of missing weights: our error says the same in one line."""
    logger = logging.getLogger("transformers.modeling_utils")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _nonsense(name: str, folder: Path) -> ConfigurationError:
    return ConfigurationError(
        f"cannot load the model at {folder}: {name} holds infinite values or NaN; fetch the files again", about=folder
    )


def _and_others(count: int) -> str:
    return "" if count == 1 else f" and {count - 1} more"
