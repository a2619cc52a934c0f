"""Checkpoints of streams: what was trained. The layers that streams run through are read from the target itself.

``stream_embeddings`` [gamma, h]; ``layers.{n}.{self_attn.q_proj,...}.lora_{A,B}.weight``, where n counts the target's
layers; with an early exit ``pruning.lora_{A,B}.weight``; for a draft vocabulary ``d2t`` and ``t2d``, as EAGLE-3 has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.drafter.heads.draft_vocabulary import SharedOutput
from services.drafter.heads.files.head_config import TargetShape
from services.drafter.heads.files.head_fields import HeadFields
from services.drafter.heads.files.head_files import CONFIG
from services.drafter.heads.files.layouts import DRAFT_OFFSETS, DRAFTED
from services.drafter.heads.files.level_files import Tensors, check_numbers, read_tensors, take_output, write_checkpoint
from services.drafter.heads.files.target_rows import read_target_rows, read_target_shape
from services.drafter.heads.streams.config import (
    ADAPTED,
    FROZEN,
    KIND,
    PRUNING,
    SHARED,
    STREAM_EMBEDDINGS,
    StreamsConfig,
    parse_streams,
)
from services.drafter.heads.streams.last_layers import LastLayers, last_layers
from services.drafter.heads.streams.own_layers import read_own_layers
from services.drafter.heads.streams.streams import Streams
from services.model_files.folder import read_json, reading


def new_streams(
    config: StreamsConfig, folder: Path, target: TargetShape, output: SharedOutput, generator: torch.Generator
) -> Streams:
    """Streams that nobody has trained: they begin as the target's own rows, a little apart.

    Raises:
        ConfigurationError: the target's layers are of a kind that is not computed here, or too few.
    """
    where = "the recipe's streams"
    if not 0 < config.num_layers < target.num_layers:
        raise HeadFields({}, where).refuse("stream_layers", config.num_layers, f"from 1 to {target.num_layers - 1}")
    own = read_own_layers(folder, last_layers(folder, target, config.num_layers, where))
    module = Streams(config, own, output)
    with torch.no_grad():
        for name, parameter in module.trained():
            if name.endswith("lora_B.weight"):
                parameter.zero_()
            else:
                spread = 0.02 if name == STREAM_EMBEDDINGS else parameter.shape[1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * spread)
    return module


@dataclass(frozen=True, slots=True)
class StoredStreams:
    """What a checkpoint holds, checked against its target; no weight of the target has been read.

    Attributes:
        tensors: float32; those that were trained, and its draft vocabulary.
        last: the target's layers that streams run through.
    """

    config: StreamsConfig
    tensors: Tensors
    last: LastLayers

    @property
    def embeddings(self) -> torch.Tensor:
        """[gamma, h], float32."""
        return self.tensors[STREAM_EMBEDDINGS].float()

    @property
    def pruning(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of the early exit's adapter, down [rank, h] and up [h, rank]; None: there is none."""
        if not self.config.pruning_rank:
            return None
        down, up = (self.tensors[f"{PRUNING}.lora_{part}.weight"].float() for part in "AB")
        return down, up

    def adapters(self) -> list[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        """Of each layer, by the name of a linear part: down [rank, inputs], and up [outputs, rank] with alpha / rank."""
        config = self.config

        def pair(linear: str) -> tuple[torch.Tensor, torch.Tensor]:
            down, up = (self.tensors[f"{linear}.lora_{part}.weight"].float() for part in "AB")
            return down, up * (config.alpha / config.rank)

        layers = range(config.target_layers - config.num_layers, config.target_layers)
        return [{name: pair(f"layers.{layer}.{name}") for name in ADAPTED} for layer in layers]


def read_streams(folder: Path, target: Path) -> StoredStreams:
    """The checkpoint in ``folder`` for the target in ``target``.

    Raises:
        ConfigurationError: as ``parse_streams``; or a tensor is no finite numbers.
    """
    where, shape = str(folder), read_target_shape(target)
    tensors = read_tensors(folder, target)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with reading(f"load the head at {folder}", about=folder):
        config, last = parse_streams(read_json(folder / CONFIG, of="head"), shapes, target, shape, where)
    check_numbers({name: each for name, each in tensors.items() if name not in (DRAFT_OFFSETS, DRAFTED)}, where)
    return StoredStreams(config, tensors, last)


def load_streams(
    folder: Path,
    target: Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Streams:
    """The streams in ``folder`` for the target in ``target``.

    Raises:
        ConfigurationError: as ``read_streams``; or the draft vocabulary is not the target's.
    """
    stored = read_streams(folder, target)
    rows = read_target_rows(target, device=device, dtype=dtype)
    output = take_output(stored.tensors, rows, read_target_shape(target), str(folder))
    module = Streams(stored.config, read_own_layers(target, stored.last), output)
    with torch.no_grad():
        for name, parameter in module.trained():
            parameter.copy_(stored.tensors[name])
    return module.to(device, dtype).requires_grad_(False).eval()


def save_streams(module: Streams, folder: Path, training: Mapping[str, Any], *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a checkpoint of which ``load_streams`` makes the same streams; the target's own weights are left out.

    Args:
        training: for training.json: how they were made.

    Raises:
        OSError: a file cannot be written.
    """
    config = module.config
    fields = {
        "model_type": KIND,
        "mode": SHARED if config.shared else FROZEN,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.target_layers,
        "draft_vocab_size": config.draft_vocab_size,
        "num_streams": config.num_streams,
        "num_stream_layers": config.num_layers,
        "lora_rank": config.rank,
        "lora_alpha": config.alpha,
    }
    if config.pruning_rank:
        fields["pruning_rank"] = config.pruning_rank
    tensors = {name: each.detach().to("cpu", dtype).contiguous() for name, each in module.trained()}
    write_checkpoint(folder, tensors, fields, training, module.output.ids)
