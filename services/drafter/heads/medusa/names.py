"""Names of the tensors of Medusa's heads.

Its authors': ``{i}.{j}.linear.{weight,bias}`` of block j of head i, and ``{i}.{blocks}.weight`` of its output layer. vLLM's,
``blocks.{i}.layers.{j}.{weight,bias}`` and ``lm_heads.{i}.weight``, are translated into them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from services.drafter.heads.files.head_fields import Shapes

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
