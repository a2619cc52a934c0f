"""What a checkpoint of Medusa's heads computes, from its config.json and the shapes of its tensors; read without torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from services.drafter.ahead_draft.ahead_fields import check_sizes, check_tensors
from services.drafter.feature_draft.head_config import TargetShape
from services.drafter.feature_draft.head_fields import HeadFields, Shapes, draft_vocab_size

_BLOCK = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
# Under which some save the heads.
_PREFIXES = ("medusa_head.", "medusa_heads.")
_MOST_HEADS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaConfig:
    """Heads.

    Attributes:
        num_heads: tokens ahead.
        num_blocks: residual blocks of a head.
        own_output: every head has an output layer of its own; otherwise all share the target's.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_heads: int
    num_blocks: int = 1
    own_output: bool = False


def is_medusa(names: Iterable[str]) -> bool:
    """Whether tensors of these names are Medusa's heads."""
    return any(_BLOCK.match(short_name(name)) for name in names)


def parse_medusa(config: Mapping[str, Any], shapes: Shapes, target: TargetShape, where: str) -> MedusaConfig:
    """What heads compute.

    Args:
        shapes: of their tensors, without prefixes.
        where: the checkpoint, for errors.

    Raises:
        ConfigurationError: they cannot draft for the target; names the field or tensor, its value and what is allowed.
    """
    fields = HeadFields.of(config, where)
    # Public ones have the fields of their base model, if any.
    check_sizes(fields, target)
    found = [match for name in shapes if (match := _BLOCK.match(name))]
    heads, blocks = (1 + max(int(match[group]) for match in found) for group in (1, 2))
    if heads > _MOST_HEADS:
        raise fields.refuse("the number of heads", heads, f"from 1 to {_MOST_HEADS}")
    width = shapes.get("0.0.linear.weight", (0,))[0]
    if width != target.hidden_size:
        raise fields.refuse("the width of 0.0.linear.weight", width, f"{target.hidden_size}, the target's hidden size")
    made = MedusaConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size(fields, shapes, target),
        num_heads=heads,
        num_blocks=blocks,
        own_output=f"0.{blocks}.weight" in shapes,
    )
    check_tensors(shapes, _shapes(made), where)
    return made


def short_names(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """``shapes`` by names without prefixes."""
    return {short_name(name): shape for name, shape in shapes.items()}


def short_name(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def parameter_names(config: MedusaConfig) -> dict[str, str]:
    """Of each parameter, its public name."""
    found = {
        f"heads.{head}.{block}.linear.{part}": f"{head}.{block}.linear.{part}"
        for head in range(config.num_heads)
        for block in range(config.num_blocks)
        for part in ("weight", "bias")
    }
    if config.own_output:
        found |= {f"outputs.{head}.weight": f"{head}.{config.num_blocks}.weight" for head in range(config.num_heads)}
    return found


def _shapes(config: MedusaConfig) -> dict[str, tuple[int, ...]]:
    size = config.hidden_size
    return {
        public: (config.draft_vocab_size, size) if name.startswith("outputs") else (size,) * (2 - name.endswith("bias"))
        for name, public in parameter_names(config).items()
    }
