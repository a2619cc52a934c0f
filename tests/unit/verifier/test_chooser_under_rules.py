"""Barred tokens: the batched chooser against the law, on a host and as if on a device, beside requests without a rule."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.verifier.choosing.chooser import Chooser
from services.verifier.choosing.reading import READER, LogitsReader
from services.verifier.kernels.native.library import library
from services.verifier.model.target_port import NOT_CHOSEN, PackedBits, Rows, Sampling
from speculation.errors import Internal
from speculation.types import SamplingParams
from tests.engine.choices import ELSEWHERE, MODEL, NONE, Case, outcomes, random_case


class AnyRule:
    """Allows some tokens, others after every path."""

    def __init__(self, seed: int, vocabulary: int, share: float) -> None:
        self._seed, self._vocabulary, self._share = seed, vocabulary, share

    def allowed(self, path: Sequence[int]) -> PackedBits | None:
        drawn = np.random.default_rng([self._seed, *path])
        bits = drawn.random(self._vocabulary) < self._share
        bits[drawn.integers(0, self._vocabulary)] = True
        # As the grammar engine, whole words of 32 bits.
        return np.resize(np.pad(np.packbits(bits, bitorder="little"), (0, 4)), -(-self._vocabulary // 32) * 4)


def ruled(source: random.Random, case: Case) -> Case:
    """The case with a rule, and with a tree that the walk goes some way through."""
    vocabulary = case.logits.shape[1]
    case = replace(case, rule=AnyRule(source.randrange(2**32), vocabulary, source.choice([0.0, 0.02, 0.5, 0.98])))
    for node, parent in enumerate(case.parents):
        if source.random() < 0.6:
            tree = list(case.tree)
            tree[node] = max(0, case.choice(parent + 1))
            case = replace(case, tree=tuple(tree))
    return case


def check(seed: int, kernels: bool = False, reader: LogitsReader = READER) -> None:
    source, compared = random.Random(seed), 0
    for _ in range(8):
        vocabulary = source.choice([37, 128, 1000])
        batch = [ruled(source, random_case(source, vocabulary, source.choice([NONE, NONE, MODEL]))) for _ in range(4)]
        batch += [random_case(source, vocabulary) for _ in range(2)]
        order = sorted(batch, key=lambda case: case.model == MODEL)
        for case, outcome in zip(order, outcomes(order, library() if kernels else None, reader), strict=True):
            reached = case.reached()
            expected = [case.choice(row) if row in reached else NOT_CHOSEN for row in range(len(case.logits))]
            assert list(outcome.choices) == expected, case.params
            for row in reached - {row for row in reached if expected[row] == NOT_CHOSEN}:
                compared += 1
                if case.rule is not None:
                    bits = case.rule.allowed(case.path(row))
                    assert bits is not None
                    assert bits[expected[row] >> 3] >> (expected[row] & 7) & 1
    assert compared > 50


@pytest.mark.examples(5)
@pytest.mark.parametrize("kernels", [False, True], ids=["numpy", "compiled"])
@pytest.mark.parametrize("seed", range(3))
def test_every_choice_is_the_laws_among_what_is_allowed(seed: int, kernels: bool) -> None:
    check(seed, kernels)


@pytest.mark.examples(3)
@pytest.mark.parametrize("seed", range(3))
def test_the_same_on_a_device(seed: int) -> None:
    check(100 + seed, reader=ELSEWHERE)


class _Nowhere:
    def allowed(self, path: Sequence[int]) -> PackedBits | None:
        raise Internal("the grammar allows no token")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rule_that_fails_fails_its_request_alone(temperature: float) -> None:
    made = Chooser()
    params = SamplingParams(temperature=temperature)
    logits = torch.randn(3, 37, generator=torch.Generator().manual_seed(1))
    for name, rule in (("a", AnyRule(1, 37, 0.5)), ("b", _Nowhere()), ("c", None)):
        made.open(name, Sampling(params=params, prompt_length=1, rule=rule))
    batch = [Rows(request_id=name, context=0, tokens=(1,), logits=1) for name in "abc"]
    first, second, third = made.outcomes(batch, logits)
    assert isinstance(second.error, Internal)
    assert second.choices == (NOT_CHOSEN,)
    assert first.error is third.error is None
    assert NOT_CHOSEN not in (*first.choices, *third.choices)
