"""Loads a head's checkpoint: config.json and safetensors, of any public layout. Nothing else is ever opened."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from services.drafter.heads.draft_vocabulary import ids_of_offsets, membership
from services.drafter.heads.eagle.head import FeatureHead
from services.drafter.heads.files.head_config import TargetShape
from services.drafter.heads.files.head_fields import parse, refused_tensor, unused
from services.drafter.heads.files.layouts import (
    COMPUTED,
    DRAFT_IDS,
    DRAFT_OFFSETS,
    DRAFTED,
    HeadLayout,
    detect,
    stripped,
)
from services.drafter.heads.files.parallel_fields import with_masks
from services.drafter.heads.files.pickled import refuse_pickles
from services.drafter.heads.files.target_rows import RowTable, TargetRows, read_target_rows, read_target_shape
from services.drafter.heads.files.target_shape import TRAINING, check_tokenizer
from services.model_files.folder import read_json, reading
from services.model_files.weights.files import WeightFiles, is_whole_float
from speculation.errors import ConfigurationError

CONFIG = "config.json"
# Matrices closer than this, relative to their size, are the target's own, rounded in another way.
_SAME = 0.01
# Rows that are compared.
_COMPARED = 512

Tensors = dict[str, torch.Tensor]


def load_head(
    folder: Path,
    target: Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> FeatureHead:
    """The head in ``folder`` for the target in ``target``.

    Raises:
        ConfigurationError: it cannot be served exactly as it was trained, or belongs to another target; names the field or
            the tensor, its value, and what is allowed.
    """
    where = str(folder)
    config = read_json(folder / CONFIG, of="head")
    recorded = read_json(folder / TRAINING, of="head") if (folder / TRAINING).is_file() else {}
    refuse_pickles(folder)
    check_tokenizer(folder, target)
    with reading(f"load the head at {folder}", about=folder):
        layout, tensors = _read(folder, config)
    shape = read_target_shape(target)
    rows = read_target_rows(target, device=device, dtype=dtype)
    ids = take_vocabulary(tensors, shape, where)
    share(tensors, rows, ids)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if ids is not None:
        shapes[DRAFT_OFFSETS] = tuple(ids.shape)
    parsed = with_masks(parse(config, layout, shapes, shape, where, recorded), config, shapes, where)
    if not parsed.own_output and parsed.logit_scale not in (1.0, rows.scale):
        raise ConfigurationError(
            place=f"cannot load the head at {where}",
            field="logit_scale",
            value=parsed.logit_scale,
            allowed=f"{rows.scale}, the target's, whose output layer it shares",
        )
    if ids is None:
        ids = torch.arange(shape.vocab_size)
    # Not accelerate's ``init_empty_weights``, which would empty what other threads load meanwhile.
    with torch.device("meta"):
        head = FeatureHead(parsed, rows, ids)
    _fill(head, tensors, layout, where)
    return head.to(device, dtype).requires_grad_(False).eval()


def _read(folder: Path, config: Mapping[str, Any]) -> tuple[HeadLayout, Tensors]:
    """The checkpoint's layout, and its tensors by canonical name."""
    with WeightFiles(folder) as files:
        names = {name: stripped(name) for name in files.names if not name.endswith(COMPUTED)}
        layout = detect(names.values(), config, str(folder))
        skipped = unused(config, layout, str(folder))
        found: Tensors = {}
        for public, short in names.items():
            name = layout.canonical(short)
            if name is None or name in found:
                what = "unknown" if name is None else f"there twice, as {name}"
                raise refused_tensor(str(folder), public, what, allowed=f"one of layout {layout.name}")
            if name not in skipped:
                found[name] = files.numbers(public)
    if "missing_state" in found:
        found["missing_state"] = found["missing_state"].flatten()
    return layout, found


def take_vocabulary(tensors: Tensors, target: TargetShape, where: str) -> torch.Tensor | None:
    """The draft vocabulary's ids [V_d], taken out of ``tensors``; None: all tokens.

    Raises:
        ConfigurationError: they are no distinct tokens of the target.
    """
    offsets, mapped, drafted = (tensors.pop(name, None) for name in (DRAFT_OFFSETS, DRAFT_IDS, DRAFTED))
    ids = mapped.to(torch.int64) if mapped is not None else None if offsets is None else ids_of_offsets(offsets)
    if ids is None:
        return None
    name = "d2t" if mapped is None else "token_map"
    if ids.dim() != 1 or not bool(((ids >= 0) & (ids < target.vocab_size)).all()):
        raise ConfigurationError(
            f"cannot load the head at {where}: {name} leads to ids from {int(ids.min())} to {int(ids.max())}: must be from "
            f"0 to {target.vocab_size - 1}, the target's",
            about=where,
        )
    if len(set(ids.tolist())) != len(ids):
        raise ConfigurationError(
            f"cannot load the head at {where}: {name} leads to a token twice: must lead to each once", about=where
        )
    if drafted is not None and not torch.equal(drafted.bool(), membership(ids, target.vocab_size)):
        raise ConfigurationError(
            f"cannot load the head at {where}: t2d marks other tokens than {name} leads to", about=where
        )
    head = tensors.get("lm_head.weight")
    if head is not None and head.shape[0] == target.vocab_size != len(ids):
        tensors["lm_head.weight"] = head[ids]
    return ids


def share(tensors: Tensors, rows: TargetRows, ids: torch.Tensor | None) -> None:
    """Drop embeddings and output rows that are copies of the target's, which has them in memory already."""
    for name, table, at in (("embed_tokens.weight", rows.embedding, None), ("lm_head.weight", rows.output, ids)):
        own = tensors.get(name)
        if own is not None and is_copy(own, table, at):
            del tensors[name]


def is_copy(own: torch.Tensor, table: RowTable, ids: torch.Tensor | None = None) -> bool:
    """Whether rows are those of ``ids`` (None: all) in the target's table, perhaps rounded in another way."""
    count = table.shape[0] if ids is None else len(ids)
    if tuple(own.shape) != (count, table.shape[1]):
        return False
    some = torch.linspace(0, count - 1, min(count, _COMPARED), dtype=torch.float64).long()
    theirs = table.rows(some if ids is None else ids[some]).float().cpu()
    return bool((own[some].float() - theirs).norm() <= _SAME * theirs.norm())


def _fill(head: FeatureHead, tensors: Tensors, layout: HeadLayout, where: str) -> None:
    """Give the module its tensors; all of them, and no others."""
    wanted = head.state_dict()
    tensors.setdefault("missing_state", torch.zeros(head.config.state_size, dtype=torch.float32))
    refused = partial(refused_tensor, where)
    for name in wanted:
        if name not in tensors:
            raise refused(layout.public(name), "missing", f"layout {layout.name} needs it")
    for name, tensor in tensors.items():
        if name not in wanted:
            raise refused(layout.public(name), "unknown", "its config.json has no place for it")
        if tensor.shape != wanted[name].shape:
            shown, must = list(tensor.shape), list(wanted[name].shape)
            raise refused(layout.public(name), shown, allowed=f"{must}, by config.json and the target")
        if not is_whole_float(tensor):
            raise refused(layout.public(name), tensor.dtype, allowed="floating-point numbers")
        if not bool(torch.isfinite(tensor).all()):
            raise refused(layout.public(name), "infinite values or NaN", verb="holds", allowed="finite numbers")
    head.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, assign=True)
