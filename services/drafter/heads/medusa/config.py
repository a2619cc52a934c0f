"""What a checkpoint of Medusa's heads computes, from its config.json and the shapes of its tensors; read without torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from services.drafter.heads.files.head_config import TargetShape
from services.drafter.heads.files.head_fields import HeadFields, Shapes, draft_vocab_size
from services.drafter.heads.files.level_fields import check_sizes, check_tensors

_OUTPUT = re.compile(r"^\d+\.\d+\.weight$")
BLOCK = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
# vLLM's, of block j of head i, and of output layers.
_VLLM_BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
_VLLM_OUTPUT = re.compile(r"^lm_heads\.(\d+)\.weight$")
# Under which some save the heads.
_PREFIXES = ("medusa_head.", "medusa_heads.")


def is_medusa(names: Iterable[str]) -> bool:
    """Whether tensors of these names are Medusa's heads."""
    return any(BLOCK.match(name) for name in authors_names(names).values())


def authors_names(names: Iterable[str]) -> dict[str, str]:
    """Of each name in a file, the one that Medusa's authors give it."""
    short = {}
    for name in names:
        plain = name
        for prefix in _PREFIXES:
            plain = plain.removeprefix(prefix)
        short[name] = plain
    found = [match for plain in short.values() if (match := _VLLM_BLOCK.match(plain))]
    if not found:
        return short
    blocks = 1 + max(int(match[2]) for match in found)
    return {name: _of_vllm(plain, blocks) for name, plain in short.items()}


def _of_vllm(name: str, blocks: int) -> str:
    if block := _VLLM_BLOCK.match(name):
        return f"{block[1]}.{block[2]}.linear.{block[3]}"
    output = _VLLM_OUTPUT.match(name)
    # One that all heads share has a name of its own, or is told as the first one's.
    return f"{output[1] if output else 0}.{blocks}.weight" if output or name == "lm_head.weight" else name


def named_by_authors(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """``shapes`` by the authors' names."""
    return {authors: shapes[name] for name, authors in authors_names(shapes).items()}


def is_output(name: str) -> bool:
    """Whether the tensor that Medusa's authors call ``name`` is an output layer."""
    return bool(_OUTPUT.match(name))


_MOST_HEADS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaConfig:
    """Heads.

    Attributes:
        num_heads: tokens ahead.
        num_blocks: residual blocks of a head.
        num_outputs: output layers that come with them: one for each head, or one for all; 0: they share the target's.
        bias: whether blocks add a bias.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_heads: int
    num_blocks: int = 1
    num_outputs: int = 0
    bias: bool = True


def parse_medusa(config: Mapping[str, Any], shapes: Shapes, target: TargetShape, where: str) -> MedusaConfig:
    """What heads compute.

    Args:
        shapes: of their tensors, see ``named_by_authors``.
        where: the checkpoint, for errors.

    Raises:
        ConfigurationError: they cannot draft for the target; names the field or tensor, its value and what is allowed.
    """
    fields = HeadFields.of(config, where)
    of_vllm = fields.fields.get("num_heads") is not None
    # The authors' have the fields of their base model, if any; vLLM counts a head's blocks as layers.
    check_sizes(fields, target, without=("num_hidden_layers",) if of_vllm else ())
    found = [match for name in shapes if (match := BLOCK.match(name))]
    heads, blocks = (1 + max(int(match[group]) for match in found) for group in (1, 2))
    if heads > _MOST_HEADS:
        raise fields.refuse("the number of heads", heads, f"from 1 to {_MOST_HEADS}")
    if of_vllm:
        _check_vllm(fields, heads, blocks)
    width = shapes.get("0.0.linear.weight", (0,))[0]
    if width != target.hidden_size:
        raise fields.refuse("the width of 0.0.linear.weight", width, f"{target.hidden_size}, the target's hidden size")
    made = MedusaConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size(fields, shapes, target),
        num_heads=heads,
        num_blocks=blocks,
        num_outputs=_outputs(fields, shapes, heads, blocks),
        bias=fields.shown_by("0.0.linear.bias", shapes, "medusa_fc_bias"),
    )
    # Output layers that score all tokens are cut to the draft vocabulary.
    cut = {
        name: (made.draft_vocab_size, *shape[1:]) if is_output(name) and shape[0] == made.vocab_size else shape
        for name, shape in shapes.items()
    }
    check_tensors(cut, _shapes(made), where)
    return made


def _check_vllm(fields: HeadFields, heads: int, blocks: int) -> None:
    for name, there in (("num_heads", heads), ("num_hidden_layers", blocks)):
        if fields.number(name, there) != there:
            raise fields.refuse(name, fields.fields[name], f"{there}, as the tensors say")
    if (scale := fields.fields.get("logit_scale")) not in (None, 1, 1.0):
        raise fields.refuse("logit_scale", scale, "1.0: logits are not scaled here")


def _outputs(fields: HeadFields, shapes: Shapes, heads: int, blocks: int) -> int:
    if f"0.{blocks}.weight" not in shapes:
        return 0
    return 1 if fields.flag("original_lm_head") else heads


def parameter_names(config: MedusaConfig) -> dict[str, str]:
    """Of each parameter, its public name."""
    found = {
        f"heads.{head}.{block}.linear.{part}": f"{head}.{block}.linear.{part}"
        for head in range(config.num_heads)
        for block in range(config.num_blocks)
        for part in (("weight", "bias") if config.bias else ("weight",))
    }
    return found | {f"outputs.{head}.weight": f"{head}.{config.num_blocks}.weight" for head in range(config.num_outputs)}


def _shapes(config: MedusaConfig) -> dict[str, tuple[int, ...]]:
    size = config.hidden_size
    return {
        public: (config.draft_vocab_size, size) if name.startswith("outputs") else (size,) * (2 - name.endswith("bias"))
        for name, public in parameter_names(config).items()
    }
