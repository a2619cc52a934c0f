"""Loads an MTP layer, from the target's own folder or from one of its own."""

from __future__ import annotations

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
from services.drafter.heads.mtp.config import BLOCK, SHARED, mtp_shapes, parse_mtp
from services.drafter.heads.mtp.head import MtpHead
from services.drafter.heads.mtp.one_layer import OneLayer
from services.model_files.folder import read_json, reading
from services.model_files.mtp_layers import MtpTensors
from services.model_files.weights.files import WeightFiles
from services.model_files.weights.for_transformers import Unread


def load_mtp(
    folder: Path, target: Path, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> MtpHead:
    """The MTP layer in ``folder`` for the target in ``target``.

    Raises:
        ConfigurationError: it cannot be served exactly as it was trained, or belongs to another target; names the field or
            the tensor, its value, and what is allowed.
    """
    where = str(folder)
    refuse_pickles(folder)
    check_tokenizer(folder, target)
    shapes = mtp_shapes(folder)
    config, found = parse_mtp(read_json(folder / CONFIG, of="MTP layer"), shapes, read_target_shape(target), where)
    rows = read_target_rows(target, device=device, dtype=dtype)
    with reading(f"load the MTP layer at {folder}", about=folder), WeightFiles(folder) as files, quietly():
        _check_shared(files, found, rows, where)
        model = OneLayer(config.layer, _of_block(found), dtype, where)
        faults = model.read({name: Unread(files, public) for name, public in _of_block(found).items()})
        for name, (fault, allowed) in sorted(faults.items()):
            raise refused_tensor(where, found.public(BLOCK + name), fault, allowed=allowed)
        block = DecoderBlock(model.layer.to(device), model.rotary().to(device), config.hidden_size, where)
        head = MtpHead(config, rows, block, model.norm).to(device)
        own = {name: files.numbers(public) for name, public in found.names.items() if _is_joint(name)}
        head.load_state_dict({name: each.to(device, dtype) for name, each in own.items()}, strict=False, assign=True)
        head.missing_state = head.missing_state.to(dtype)
    _check_finite(head, found, where)
    return head.requires_grad_(False).eval()


def _of_block(found: MtpTensors) -> dict[str, str]:
    """The decoder layer's tensors: their names within it, with those in the checkpoint."""
    return {name.removeprefix(BLOCK): public for name, public in found.names.items() if name.startswith(BLOCK)}


def _is_joint(name: str) -> bool:
    return not name.startswith(BLOCK) and name not in SHARED


def _check_shared(files: WeightFiles, found: MtpTensors, rows: TargetRows, where: str) -> None:
    """Embeddings and output rows that an MTP layer brings along are the target's."""
    for name, table in zip(SHARED, (rows.embedding, rows.output), strict=True):
        public = found.names.get(name)
        if public is not None and not is_copy(files.numbers(public), table):
            raise refused_tensor(where, public, "another than the target's", allowed="the target's, which MTP layers share")


def _check_finite(head: MtpHead, found: MtpTensors, where: str) -> None:
    refused = partial(refused_tensor, where)
    for name, parameter in head.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            public = found.public(name.replace("block.layer.", BLOCK))
            raise refused(public, "infinite values or NaN", verb="holds", allowed="finite numbers")
