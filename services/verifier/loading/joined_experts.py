"""A folder's weights by the names of a model whose experts are joined in one weight, as transformers joins them.

Published files have matrices for each expert. Those of all experts are one weight in the model, gates before ups.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Set

import torch

from services.model_files.weights.files import WeightFiles
from services.model_files.weights.stored_blocks import StoredBlocks, Weight
from services.verifier.stages.stage_ranks import Cut

# What the part of a layer is called in files, and in the model.
_PARTS = {"mlp": "mlp", "block_sparse_moe": "mlp"}
# The matrices of an expert that are one in the model, in their order, by its name there.
_MATRICES = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
_OF_EXPERT = re.compile(rf"(.*)\.({'|'.join(_PARTS)})\.experts\.(\d+)\.(\w+)\.weight")
_OF_PART = re.compile(r"(.*)\.block_sparse_moe\.(.*)")


class JoinedExperts:
    """The weights in ``files``; those that have to be joined or renamed are under the names in ``wanted``.

    Args:
        wanted: what the model calls its weights.

    Attributes:
        names: of all weights.
    """

    def __init__(self, files: WeightFiles, wanted: Collection[str]) -> None:
        self._files = files
        # By the model's name and the expert, the names of its matrices in the files.
        self._joined: dict[str, list[tuple[str, ...]]] = {}
        self._renamed: dict[str, str] = {}
        by_expert: dict[tuple[str, str], dict[int, dict[str, str]]] = {}
        for name in files.names:
            if (found := _OF_EXPERT.fullmatch(name)) is not None:
                layer, part, number, matrix = found.groups()
                by_expert.setdefault((layer, part), {}).setdefault(int(number), {})[matrix] = name
            elif (found := _OF_PART.fullmatch(name)) is not None and name not in wanted:
                self._renamed[f"{found[1]}.mlp.{found[2]}"] = name
        for (layer, part), experts in by_expert.items():
            for joined, known in _MATRICES.items():
                name = f"{layer}.{_PARTS[part]}.experts.{joined}"
                if name in wanted and (matrices := _complete(experts, known)):
                    self._joined[name] = matrices
        taken = {one for experts in self._joined.values() for matrices in experts for one in matrices}
        own = files.names - taken - set(self._renamed.values())
        self.names: Set[str] = own | self._joined.keys() | self._renamed.keys()

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a weight, as numbers; where experts differ, of one that does."""
        if name not in self._joined:
            return self._files.shape(self._renamed.get(name, name))
        experts = self._joined[name]
        shapes = [[self._files.shape(one) for one in matrices] for matrices in experts]
        other = next((each for each in shapes if each != shapes[0] or len({one[1:] for one in each}) > 1), None)
        if other is not None:
            return other[-1]
        return (len(experts), sum(one[0] for one in shapes[0]), *shapes[0][0][1:])

    def get(self, name: str, cut: Cut | None = None) -> Weight:
        """A weight as stored, or the part of it that a rank holds. Of what is joined, blocks become numbers."""
        if name not in self._joined:
            own = self._renamed.get(name, name)
            return self._files.get(own) if cut is None else self._files.parts(own, cut.axis, cut.ranges)
        shape = list(self.shape(name))
        if cut is not None:
            shape[cut.axis] = cut.pieces * (cut.end - cut.begin)
        made: torch.Tensor | None = None
        for number, matrices in enumerate(self._joined[name]):
            read = torch.cat([_numbers(self._read(one, cut, len(matrices))) for one in matrices])
            if made is None:
                made = read.new_empty(shape)
            made[number] = read
        assert made is not None
        return made

    def _read(self, name: str, cut: Cut | None, pieces: int) -> Weight:
        if cut is None:
            return self._files.get(name)
        # Outputs of each matrix.
        assert (cut.axis, cut.pieces) == (1, pieces)
        return self._files.part(name, cut.begin, cut.end)


def _complete(experts: dict[int, dict[str, str]], known: tuple[tuple[str, ...], ...]) -> list[tuple[str, ...]]:
    """The matrices of all experts, in the order of their numbers; empty if one lacks any."""
    for names in known:
        if sorted(experts) == list(range(len(experts))) and all(each.keys() >= set(names) for each in experts.values()):
            return [tuple(experts[number][name] for name in names) for number in range(len(experts))]
    return []


def _numbers(weight: Weight) -> torch.Tensor:
    return weight.float() if isinstance(weight, StoredBlocks) else weight
