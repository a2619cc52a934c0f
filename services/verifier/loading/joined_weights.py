"""A folder's weights by the names of a model, renamed and joined by the rules by which transformers does so.

Published files have, for instance, matrices for each expert. Those of all experts are one weight in the model, gates before
ups. The rules are transformers' own tables of a type. What it splits, turns or computes otherwise is not read here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Set
from typing import NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from services.model_files.weights.described import BLOCKS
from services.model_files.weights.files import WeightFiles
from services.model_files.weights.stacked_blocks import AnyWeight, StackedBlocks, in_a_stack, one_below_the_other
from services.model_files.weights.stored_blocks import Weight, numbers_of
from services.verifier.stages.stage_ranks import Cut

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class _Joined(NamedTuple):
    """What is one weight in the model: matrices below each other, of each expert if there are some.

    Attributes:
        stacked: experts have an axis of their own; otherwise there is one.
    """

    experts: list[tuple[str, ...]]
    stacked: bool


class JoinedWeights:
    """The weights in ``files``; those that have to be joined or renamed are under the names in ``wanted``.

    Args:
        model: whose weights they are, by its type.
        wanted: what the whole model calls those that are asked for.

    Attributes:
        names: of all weights.
        stacked: those of them that matrices of experts are joined to.
    """

    def __init__(self, files: WeightFiles, model: PreTrainedModel, wanted: Collection[str]) -> None:
        self._files = files
        self._renamed: dict[str, str] = {}
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        places = dict.fromkeys(wanted, True)
        # By the model's name and the pattern of a rule, what of it is in the files.
        parts: dict[str, dict[str, list[str]]] = {}
        for name in files.names:
            found, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, places)
            # The files' own name goes before a rule that leads nowhere, as in transformers.
            if found == name or found not in places:
                continue
            if pattern is None:
                self._renamed[found] = name
            else:
                parts.setdefault(found, {}).setdefault(pattern, []).append(name)
        self._joined = {name: joined for name, found in parts.items() if (joined := _joined(found, converters)) is not None}
        self.stacked = frozenset(name for name, joined in self._joined.items() if joined.stacked)
        taken = {one for joined in self._joined.values() for matrices in joined.experts for one in matrices}
        own = files.names - taken - set(self._renamed.values())
        self.names: Set[str] = own | self._joined.keys() | self._renamed.keys()

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a weight, as numbers; where experts differ, of one that does."""
        if name not in self._joined:
            return self._files.shape(self._renamed.get(name, name))
        experts, stacked = self._joined[name]
        shapes = [[self._files.shape(one) for one in matrices] for matrices in experts]
        other = next((each for each in shapes if each != shapes[0] or len({one[1:] for one in each}) > 1), None)
        if other is not None:
            return other[-1]
        of_each = (sum(one[0] for one in shapes[0]), *shapes[0][0][1:])
        return (len(experts), *of_each) if stacked else of_each

    def sources(self, name: str) -> list[tuple[str, ...]]:
        """What the files call the matrices that a weight is made of: those of each expert, if there are some."""
        return self._joined[name].experts if name in self._joined else [(self._renamed.get(name, name),)]

    def get(self, name: str, cut: Cut | None = None) -> AnyWeight:
        """A weight as stored, or the part of it that a rank holds. Experts' matrices stay in blocks; what else is joined
        becomes numbers."""
        if name not in self._joined:
            own = self._renamed.get(name, name)
            return self._files.get(own) if cut is None else self._files.parts(own, cut.axis, cut.ranges)
        experts, stacked = self._joined[name]
        if not stacked:
            # Ranks share none of these.
            assert cut is None
            return torch.cat([self._files.numbers(one) for one in experts[0]])
        if self._files.kind(experts[0][0]) in BLOCKS:
            each = ([self._read(one, cut, len(matrices)) for one in matrices] for matrices in experts)
            return in_a_stack([one_below_the_other(matrices) for matrices in each])
        shape = list(self.shape(name))
        if cut is not None:
            shape[cut.axis] = cut.held
        made: torch.Tensor | None = None
        for number, matrices in enumerate(experts):
            read = torch.cat([numbers_of(self._read(one, cut, len(matrices))) for one in matrices])
            if made is None:
                made = read.new_empty(shape)
            made[number] = read
        assert made is not None
        return made

    def _read(self, name: str, cut: Cut | None, pieces: int) -> Weight:
        """Of one matrix, that or the same outputs of each."""
        if cut is None:
            found = self._files.get(name)
        else:
            assert (cut.axis, len(cut.ranges)) == (1, pieces)
            found = self._files.part(name, cut.ranges[0].start, cut.ranges[0].stop)
        assert not isinstance(found, StackedBlocks)
        return found


def _joined(found: Mapping[str, list[str]], converters: Iterable[WeightConverter]) -> _Joined | None:
    """The weight that a rule makes of what the files hold, by its patterns; None: it lacks any, or the rule does more."""
    rule = next(each for each in converters if next(iter(found)) in each.source_patterns)
    steps = [(type(step), step.dim) for step in rule.operations if isinstance(step, (MergeModulelist, Concatenate))]
    of_each = [sorted(found.get(pattern, ()), key=_numbers_in) for pattern in rule.source_patterns]
    if len(steps) != len(rule.operations) or not all(len(names) == len(of_each[0]) > 0 for names in of_each):
        return None
    if steps == [(Concatenate, 0)] and len(of_each[0]) == 1:
        return _Joined([tuple(name for (name,) in of_each)], stacked=False)
    if steps != [(MergeModulelist, 0), (Concatenate, 1)][: min(2, len(of_each))]:
        return None
    if any([_numbers_in(name)[-1] for name in names] != list(range(len(names))) for names in of_each):
        return None
    return _Joined(list(zip(*of_each, strict=True)), stacked=True)


def _numbers_in(name: str) -> list[int]:
    """Those of the layer and, last, of the expert."""
    return [int(number) for number in _NUMBER.findall(name)]
