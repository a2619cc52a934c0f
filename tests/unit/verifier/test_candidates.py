"""What is left to choose from, by top-k, top-p and min-p and by the noise: as transformers and the generators say."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from services.verifier.choosing import candidates
from services.verifier.choosing.device_choice import words
from services.verifier.choosing.processors import build_truncation
from speculation.philox import NoiseStream, gumbel, gumbels, uniforms
from speculation.types import SamplingParams
from tests.engine.choices import random_logits, random_params


def test_the_kept_tokens_are_those_of_transformers() -> None:
    """The very set that top-k, top-p and min-p leave, wherever the chooser does not ask transformers itself."""
    source, decided, asked = random.Random(3), 0, 0
    for _ in range(400):
        vocabulary = source.choice([64, 1000, 6400])
        params = [
            replace(random_params(source, vocabulary), temperature=1.0, top_p=source.choice([0.3, 0.9, 0.99]))
            for _ in range(3)
        ]
        logits = random_logits(source, 3, vocabulary)
        for row, own, found in zip(logits, params, candidates.narrow(logits, params), strict=True):
            truncation = build_truncation(own)
            assert truncation is not None
            kept = truncation(row, ())
            if found is None:
                asked += 1
                continue
            decided += 1
            assert np.array_equal(found.ids, np.flatnonzero(kept.numpy() > -np.inf)), own
            assert np.array_equal(found.weights, kept.numpy()[found.ids].astype(np.float64))
    assert decided > asked


def test_what_rounding_decides_is_left_to_transformers() -> None:
    """Equal logits on both sides of a limit; a nucleus that ends on its limit exactly, or as good as."""
    quarters = torch.full((1, 4), math.log(0.25))
    halves = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]]))
    assert candidates.narrow(quarters, [SamplingParams(temperature=1.0, top_p=0.6)]) == [None]
    assert candidates.narrow(halves, [SamplingParams(temperature=1.0, min_p=0.5)]) == [None]
    for top_p in (0.5, 0.75, 0.75 + 1e-7, 0.75 - 1e-7):
        params = SamplingParams(temperature=1.0, top_p=top_p)
        found = candidates.narrow(halves, [params])[0]
        truncation = build_truncation(params)
        assert found is not None and truncation is not None
        assert np.array_equal(found.ids, np.flatnonzero(truncation(halves[0], ()).numpy() > -np.inf))


def test_sums_are_only_as_exact_as_they_are_said_to_be() -> None:
    """Flat distributions, whose nucleus ends among tokens of all but no probability."""
    seeded = np.random.default_rng(11)
    sorted_after_all = []
    by_sorting = candidates._nucleus_by_sorting

    def counted(*given: Any) -> Any:
        sorted_after_all.append(given)
        return by_sorting(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "_nucleus_by_sorting", counted)
        for spread in (0.1, 1.0, 2.0, 3.0):
            logits = torch.from_numpy(seeded.normal(0, spread, (6, 49152)).astype(np.float32))
            for top_p in (0.2, 0.9, 0.999):
                params = SamplingParams(temperature=1.0, top_p=top_p)
                truncation = build_truncation(params)
                assert truncation is not None
                for row, found in zip(logits, candidates.narrow(logits, [params] * 6), strict=True):
                    if found is not None:
                        assert np.array_equal(found.ids, np.flatnonzero(truncation(row, ()).numpy() > -np.inf))
    assert 0 < len(sorted_after_all) < 72


def test_many_requests_noise_is_each_ones_own() -> None:
    ids = np.array([0, 5, 49151, 7, 2**33])
    seeds, positions = [0, 3, 2**64 - 1, 3, 12], [0, 9, 2**35, 10, 4]
    made = gumbels(np.array(seeds, dtype=np.uint64), NoiseStream.CHOICE, np.array(positions), ids)
    alone = [
        gumbel(seed, NoiseStream.CHOICE, position, np.array([token]))[0]
        for seed, position, token in zip(seeds, positions, ids, strict=True)
    ]
    assert made.tolist() == alone


def test_a_devices_words_are_the_generators() -> None:
    seeds, positions, size = [0, 2**64 - 1, 2**63 + 12345], [0, 2**33 + 5, 17], 1001
    made = words(seeds, NoiseStream.CHOICE, positions, size, torch.device("cpu"))
    for row, seed, position in zip(made.numpy(), seeds, positions, strict=True):
        expected = uniforms(seed, NoiseStream.CHOICE, position, np.arange(size))
        assert np.array_equal((row.astype(np.float64) + 0.5) / 2.0**32, expected)
