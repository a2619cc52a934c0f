"""Tells what a folder of drafter weights is, by its configuration and the headers of its files; no weight is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.drafter.draft_model.mask import mask_of
from services.drafter.heads.assistant.config import is_assistant, parse_assistant
from services.drafter.heads.blocks.fields import is_block, named, parse_blocks
from services.drafter.heads.files.head_config import FINAL, HeadConfig
from services.drafter.heads.files.head_fields import Shapes, parse, unused
from services.drafter.heads.files.layouts import COMPUTED, HeadLayout, detect, refuse_others, stripped
from services.drafter.heads.files.parallel_fields import is_parallel, with_masks
from services.drafter.heads.files.pickled import refuse_pickles
from services.drafter.heads.files.target_shape import TRAINING, check_tokenizer, read_target_shape
from services.drafter.heads.medusa.config import is_medusa, named_by_authors, parse_medusa
from services.drafter.heads.mtp.config import is_mtp, mtp_numbers, mtp_tensors, parse_mtp
from services.drafter.heads.streams.config import KIND, parse_streams
from services.drafter.heads.uno.config import count_numbers, parse_uno
from services.model_files.folder import read_json, reading, text_config
from services.model_files.peft_config import CONFIG as PEFT_CONFIG
from services.model_files.weights.headers import read_shapes
from services.model_files.weights.shared import SharedWeights, read_shared
from speculation.errors import ConfigurationError, spelled

# Parts that a head of hidden states has and a language model has not.
_OF_HEADS = ("fc.", "fusion_fc.", "midlayer.", "layers.0.hidden_norm.", "blocks.", "medusa_heads.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A drafter's weights.

    Attributes:
        source: the source that runs them.
        layers: the target's layers whose states they read, see ``Features.layers``.
        layers_in_pass: the same if the target computes streams in its own pass; empty: these weights are no streams.
        numbers: how many numbers its files hold, and how many of the target's output rows are kept beside them.
    """

    folder: Path
    source: str
    layers: tuple[int, ...]
    numbers: int
    layers_in_pass: tuple[int, ...] = ()

    @property
    def in_target(self) -> bool:
        """Whether the target computes them in its own passes, and holds them in float32."""
        return self.source == "uno"

    def bytes_in(self, dtype: str) -> int:
        """Memory of the weights in numbers of ``dtype``, as torch names it; what becomes int8 is read in float32 first."""
        return self.numbers * (4 if dtype in ("float32", "int8") or self.in_target else 2)


def inspect(folder: Path, target: Path | None) -> Checkpoint:
    """What the weights in ``folder`` are.

    Args:
        target: folder of the target that they must suit; None: it is not here yet, and nothing is said of layers.

    Raises:
        ConfigurationError: they are no drafter's, or another target's; names the field or tensor, its value and what is
            allowed.
    """
    if not folder.is_dir():
        raise ConfigurationError("no such folder", field="drafter.models", verb="names", value=folder)
    # Their fields may be of any kind, and their tensors of any shape.
    with reading(f"read the drafter at {folder}", about=folder):
        return _inspected(folder, target)


def _inspected(folder: Path, target: Path | None) -> Checkpoint:
    where = str(folder)
    if (folder / PEFT_CONFIG).is_file():
        return _uno(folder, target)
    config = read_json(folder / "config.json", of="drafter")
    refuse_pickles(folder)
    shapes = {name: shape for name, shape in read_shapes(folder).items() if not name.endswith(COMPUTED)}
    numbers = sum(math.prod(shape) for shape in shapes.values())
    if target is not None and not _is_whole_model(shapes, folder):
        check_tokenizer(folder, target)
    if is_assistant(config, shapes):
        return _assistant(folder, config, shapes, numbers, target)
    if config.get("model_type") == KIND:
        return _streams(folder, config, shapes, numbers, target)
    if is_mtp(folder, config, shapes, target):
        return _mtp(folder, config, shapes, target)
    if is_medusa(shapes):
        return _medusa(folder, config, shapes, numbers, target)
    if is_block(shapes):
        return _blocks(folder, config, shapes, numbers, target)
    shared = read_shared(folder)
    if shared is not None or is_language_model(shapes):
        refuse_others(config, where, "PARD")
        mask_of(config, where)
    if shared is not None:
        return _sharing(folder, config, shared, shapes, numbers, target)
    if is_language_model(shapes):
        return Checkpoint(folder=folder, source="draft_model", layers=(), numbers=numbers)
    layout = detect([stripped(name) for name in shapes], config, where)
    if target is None:
        parallel = layout.family == "eagle3" and is_parallel(config)
        return Checkpoint(folder=folder, source="peagle" if parallel else layout.family, layers=(), numbers=numbers)
    head = _head(folder, config, shapes, layout, target)
    kept = 0 if head.own_output else head.draft_vocab_size * head.target_hidden_size
    return Checkpoint(folder=folder, source=head.source, layers=head.state_layers, numbers=numbers + kept)


def _streams(folder: Path, config: Mapping[str, Any], shapes: Shapes, numbers: int, target: Path | None) -> Checkpoint:
    if target is None:
        return Checkpoint(folder=folder, source="streaming", layers=(), numbers=numbers)
    found, own = parse_streams(config, shapes, target, read_target_shape(target), str(folder))
    kept = own.numbers + found.draft_vocab_size * found.hidden_size
    return Checkpoint(
        folder=folder,
        source="streaming",
        layers=(found.state_layer,),
        numbers=numbers + kept,
        layers_in_pass=found.layers_in_pass,
    )


def _uno(folder: Path, target: Path | None) -> Checkpoint:
    """Nothing tells an adapter that drafts from one that answers, but that it is named among the drafters."""
    numbers = count_numbers(folder)
    if target is not None:
        parse_uno(folder, target)
    return Checkpoint(folder=folder, source="uno", layers=(), numbers=numbers)


def _medusa(folder: Path, config: Mapping[str, Any], shapes: Shapes, numbers: int, target: Path | None) -> Checkpoint:
    if target is None:
        return Checkpoint(folder=folder, source="medusa", layers=(), numbers=numbers)
    found = parse_medusa(config, named_by_authors(shapes), read_target_shape(target), str(folder))
    kept = 0 if found.num_outputs else found.draft_vocab_size * found.hidden_size
    return Checkpoint(folder=folder, source="medusa", layers=(FINAL,), numbers=numbers + kept)


def _mtp(folder: Path, config: Mapping[str, Any], shapes: Shapes, target: Path | None) -> Checkpoint:
    found, kept = mtp_tensors(shapes, str(folder)), 0
    if target is not None:
        own, found = parse_mtp(config, shapes, read_target_shape(target), str(folder))
        kept = own.vocab_size * own.hidden_size
    return Checkpoint(folder=folder, source="mtp", layers=(FINAL,), numbers=mtp_numbers(found, shapes) + kept)


def _assistant(folder: Path, config: Mapping[str, Any], shapes: Shapes, numbers: int, target: Path | None) -> Checkpoint:
    """Beside its own, it keeps what makes the target's keys."""
    if target is None:
        return Checkpoint(folder=folder, source="mtp", layers=(FINAL,), numbers=numbers)
    found = parse_assistant(config, shapes, read_target_shape(target), read_shapes(target), str(folder))
    kept = sum(
        each.heads * each.width * found.target_hidden_size * (1 + each.own_values) for each in found.looked_at.values()
    )
    return Checkpoint(folder=folder, source="mtp", layers=found.state_layers, numbers=numbers + kept)


def _blocks(folder: Path, config: Mapping[str, Any], shapes: Shapes, numbers: int, target: Path | None) -> Checkpoint:
    if target is None:
        return Checkpoint(folder=folder, source="dflash", layers=(), numbers=numbers)
    found = parse_blocks(config, named(shapes), read_target_shape(target), str(folder)).layer
    kept = 0 if found.own_output else found.draft_vocab_size * found.target_hidden_size
    return Checkpoint(folder=folder, source="dflash", layers=found.state_layers, numbers=numbers + kept)


def _sharing(
    folder: Path, config: Mapping[str, Any], shared: SharedWeights, shapes: Shapes, numbers: int, target: Path | None
) -> Checkpoint:
    """A draft model that shares weights with its target; both hold them in memory."""
    if target is None:
        return Checkpoint(folder=folder, source="draft_model", layers=(), numbers=numbers)
    own, wanted = text_config(dict(config)), text_config(read_json(target / "config.json", of="target"))
    for field in ("hidden_size", "vocab_size"):
        if own.get(field) != wanted.get(field):
            raise ConfigurationError(
                place=folder, field=field, value=own.get(field), allowed=f"{spelled(wanted.get(field))}, the target's"
            )
    theirs = read_shapes(target)
    kept = sum(math.prod(theirs[name]) for name in shared.names(shapes, theirs).values())
    return Checkpoint(folder=folder, source="draft_model", layers=(), numbers=numbers + kept)


def _is_whole_model(shapes: Shapes, folder: Path) -> bool:
    """Whether it has a tokenizer of its own, whose tokens are mapped to the target's."""
    return is_language_model(shapes) and (folder / "tokenizer.json").is_file()


def is_language_model(names: Iterable[str]) -> bool:
    """Whether tensors of these names are a whole language model's, and not a head's."""
    short = [stripped(name) for name in names]
    return any(".layers.0." in f".{name}" or ".h.0." in f".{name}" for name in short) and not any(
        name.startswith(_OF_HEADS) for name in short
    )


def _head(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], layout: HeadLayout, target: Path
) -> HeadConfig:
    known = {layout.canonical(stripped(name)): shape for name, shape in shapes.items()}
    skipped = unused(config, layout, str(folder))
    used = {name: shape for name, shape in known.items() if name is not None and name not in skipped}
    recorded = read_json(folder / TRAINING, of="head") if (folder / TRAINING).is_file() else {}
    head = parse(config, layout, used, read_target_shape(target), str(folder), recorded)
    return with_masks(head, config, used, str(folder))
