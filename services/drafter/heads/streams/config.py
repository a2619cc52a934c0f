"""What a checkpoint of streams computes, from its config.json and the shapes of its tensors; read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.drafter.heads.files.head_config import HeadConfig, TargetShape
from services.drafter.heads.files.head_fields import HeadFields, Shapes, draft_vocab_size
from services.drafter.heads.files.level_fields import check_sizes, check_tensors
from services.drafter.heads.streams.last_layers import LastLayers, last_layers

# ``model_type`` of their config.json.
KIND = "speculative_streaming"
# ``mode`` there: adapters act on streams alone, or on the target's own rows as well.
FROZEN, SHARED = "frozen", "shared"
STREAM_EMBEDDINGS = "stream_embeddings"
# The adapter of the early exit, which prunes trees.
PRUNING = "pruning"
# Where adapters are, within a layer.
ADAPTED = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")
_MOST_STREAMS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamsConfig:
    """Streams.

    Attributes:
        num_streams: tokens ahead, gamma.
        num_layers: the target's last layers that streams run through, Ns.
        target_layers: the target's layers, N.
        alpha: adapters add alpha / rank * B A x.
        pruning_rank: of the early exit's adapter, o_theta in section 3.2.3; 0: there is none.
        shared: adapters act on the target's own rows, too, as in the paper. They can be trained, and never serve.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_streams: int
    num_layers: int
    target_layers: int
    rank: int
    alpha: float
    pruning_rank: int = 0
    shared: bool = False

    @property
    def state_layer(self) -> int:
        """The layer whose states it reads, see ``Features.layers``."""
        return self.target_layers - self.num_layers - 1

    @property
    def layers_in_pass(self) -> tuple[int, ...]:
        """What stands for the streams that the target computes in its own pass, see ``Features.layers``."""
        return tuple(range(self.target_layers, self.target_layers + self.num_streams))


def parse_streams(
    config: Mapping[str, Any], shapes: Shapes, folder: Path, target: TargetShape, where: str
) -> tuple[StreamsConfig, LastLayers]:
    """What a checkpoint of streams computes, and over which layers.

    Args:
        shapes: of its tensors.
        folder: of the target.
        where: the checkpoint, for errors.

    Raises:
        ConfigurationError: it cannot draft for the target; names the field or tensor, its value and what is allowed.
    """
    fields = HeadFields.of(config, where)
    if (mode := fields.fields.get("mode", FROZEN)) != FROZEN:
        raise fields.refuse("mode", mode, f"{FROZEN}: adapters that act on the target's own rows change what it says")
    check_sizes(fields, target)
    layers, streams = fields.number("num_stream_layers"), fields.number("num_streams")
    if layers >= target.num_layers:
        raise fields.refuse(
            "num_stream_layers", layers, f"from 1 to {target.num_layers - 1}: fewer than the target's layers"
        )
    if streams > _MOST_STREAMS:
        raise fields.refuse("num_streams", streams, f"from 1 to {_MOST_STREAMS}")
    rank = fields.number("lora_rank")
    alpha = fields.fields.get("lora_alpha", rank)
    if type(alpha) not in (int, float) or alpha <= 0:
        raise fields.refuse("lora_alpha", alpha, "a positive number")
    last = last_layers(folder, target, layers, where)
    found = StreamsConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size(fields, shapes, target),
        num_streams=streams,
        num_layers=layers,
        target_layers=target.num_layers,
        rank=rank,
        alpha=float(alpha),
        pruning_rank=fields.number("pruning_rank") if "pruning_rank" in fields.fields else 0,
    )
    check_tensors(shapes, trained_shapes(found, last.config), where)
    return found, last


def trained_shapes(config: StreamsConfig, layers: HeadConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of what was trained, by name.

    Args:
        layers: the target's last ones.
    """
    size, rank, shapes = config.hidden_size, config.rank, layers.layer_shapes
    found: dict[str, tuple[int, ...]] = {STREAM_EMBEDDINGS: (config.num_streams, size)}
    if config.pruning_rank:
        found[f"{PRUNING}.lora_A.weight"] = (config.pruning_rank, size)
        found[f"{PRUNING}.lora_B.weight"] = (size, config.pruning_rank)
    for number in range(config.target_layers - config.num_layers, config.target_layers):
        for name in ADAPTED:
            written, read = shapes[f"{name}.weight"]
            found[f"layers.{number}.{name}.lora_A.weight"] = (rank, read)
            found[f"layers.{number}.{name}.lora_B.weight"] = (written, rank)
    return found
