"""Loads MTP layers, from the target's own folder or from one of their own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from services.drafter.draft_model.loading import quietly
from services.drafter.heads.files.head_fields import refused_tensor
from services.drafter.heads.files.head_files import CONFIG, is_copy
from services.drafter.heads.files.pickled import refuse_pickles
from services.drafter.heads.files.target_rows import TargetRows, read_target_rows
from services.drafter.heads.files.target_shape import check_tokenizer, read_target_shape
from services.drafter.heads.mtp.block import DecoderBlock
from services.drafter.heads.mtp.config import BLOCK, SHARED, MtpConfig, mtp_shapes, parse_mtp
from services.drafter.heads.mtp.head import MtpHead, MtpLayer
from services.drafter.heads.mtp.one_layer import OneLayer
from services.model_files.folder import read_json, reading
from services.model_files.mtp_layers import MtpLayerTensors
from services.model_files.weights.files import WeightFiles
from services.model_files.weights.for_transformers import Unread
from speculation.errors import ConfigurationError


def load_mtp(
    folder: Path, target: Path, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> MtpHead:
    """The MTP layers in ``folder`` for the target in ``target``.

    Raises:
        ConfigurationError: they cannot be served exactly as they were trained, or belong to another target; names the field
            or the tensor, its value, and what is allowed.
    """
    where = str(folder)
    refuse_pickles(folder)
    check_tokenizer(folder, target)
    shapes = mtp_shapes(folder)
    config, found = parse_mtp(read_json(folder / CONFIG, of="MTP layer"), shapes, read_target_shape(target), where)
    rows = read_target_rows(target, device=device, dtype=dtype)
    with reading(f"load the MTP layer at {folder}", about=folder), WeightFiles(folder) as files, quietly():
        layers = [_layer(config, each, files, rows, where, device, dtype) for each in found.layers]
        _check_alike(layers, where)
    head = MtpHead(config, rows, layers).to(device)
    head.missing_state = head.missing_state.to(dtype)
    return head.requires_grad_(False).eval()


def _layer(
    config: MtpConfig,
    found: MtpLayerTensors,
    files: WeightFiles,
    rows: TargetRows,
    where: str,
    device: str | torch.device,
    dtype: torch.dtype,
) -> MtpLayer:
    _check_shared(files, found, rows, where)
    in_block = {name.removeprefix(BLOCK): public for name, public in found.names.items() if name.startswith(BLOCK)}
    model = OneLayer(config.layer, in_block, dtype, where)
    faults = model.read({name: Unread(files, public) for name, public in in_block.items()})
    for name, (fault, allowed) in sorted(faults.items()):
        raise refused_tensor(where, found.public(BLOCK + name), fault, allowed=allowed)
    block = DecoderBlock(model.layer.to(device), model.rotary().to(device), config.hidden_size, where)
    layer = MtpLayer(config, block, model.norm).to(device)
    own = {name: files.numbers(public) for name, public in found.names.items() if _is_joint(name)}
    layer.load_state_dict({name: each.to(device, dtype) for name, each in own.items()}, strict=False, assign=True)
    _check_finite(layer, found, where)
    return layer


def _is_joint(name: str) -> bool:
    return not name.startswith(BLOCK) and name not in SHARED


def _check_alike(layers: Sequence[MtpLayer], where: str) -> None:
    """The rows of all layers lie in one cache."""
    first, *others = ((each.block.sizes.calls, each.block.sizes.heads, each.block.sizes.width) for each in layers)
    for number, sizes in enumerate(others, 2):
        if sizes != first:
            raise ConfigurationError(
                place=f"cannot load the MTP layer at {where}",
                field=f"attention calls, heads and their width in its layer {number}",
                value=list(sizes),
                verb="are",
                allowed=f"{list(first)}, those of the first layer",
            )


def _check_shared(files: WeightFiles, found: MtpLayerTensors, rows: TargetRows, where: str) -> None:
    """Embeddings and output rows that an MTP layer brings along are the target's."""
    for name, table in zip(SHARED, (rows.embedding, rows.output), strict=True):
        public = found.names.get(name)
        if public is not None and not is_copy(files.numbers(public), table):
            raise refused_tensor(where, public, "another than the target's", allowed="the target's, which MTP layers share")


def _check_finite(layer: MtpLayer, found: MtpLayerTensors, where: str) -> None:
    refused = partial(refused_tensor, where)
    for name, parameter in layer.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            public = found.public(name.replace("block.layer.", BLOCK))
            raise refused(public, "infinite values or NaN", verb="holds", allowed="finite numbers")
