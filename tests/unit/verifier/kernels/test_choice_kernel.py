"""The native kernel that chooses: what it leaves to others, its noise, and that a wrong one is noticed.

That its choices are the law's is checked in test_chooser.py.
"""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from services.verifier.choosing.walks import ChoicePoint, RequestState
from services.verifier.kernels.native.choice_kernel import UNDECIDED, ChoiceKernel
from services.verifier.kernels.native.library import Library
from services.verifier.model.target_port import Sampling
from speculation.choose import choose
from speculation.philox import NoiseStream, uniforms
from speculation.types import SamplingParams
from tests.engine.choices import EOS, NONE, check_all, outcomes, random_case, random_logits, random_params
from tests.kernels.kernels_here import SETS, all_here, kernels_of, planted_kernels

# What choose.c says; the lead that a token must have over the next is ten times as large.
NOISE_ERROR = 1e-5


@pytest.fixture(params=SETS)
def kernels(request: pytest.FixtureRequest) -> Library:
    return kernels_of(request.param)


def words_of(kernels: Library, seed: int, position: int, count: int) -> np.ndarray:
    made = np.empty(count, dtype=np.uint32)
    function = kernels.functions.outrider_words
    function.argtypes, function.restype = [ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p], None
    function(seed, position, count, made.ctypes.data)
    return made


def noise_of(kernels: Library, words: np.ndarray) -> np.ndarray:
    assert len(words) % 32 == 0
    made = np.empty(len(words), dtype=np.float32)
    function = kernels.functions.outrider_gumbel
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p], None
    function(words.ctypes.data, len(words), made.ctypes.data)
    return made


def points_of(cases: list[SamplingParams], text: tuple[int, ...] = (1, 2, 3)) -> list[ChoicePoint]:
    """One for each row, after ``text`` and, for every other one, a path."""
    points = []
    for row, params in enumerate(cases):
        request = RequestState(Sampling(params=params, prompt_length=2), EOS, NONE)
        request.advance(0, text)
        path = (5, 1, 5)[: 3 * (row % 2)]
        points.append(ChoicePoint(request, row, len(text) + len(path), path))
    return points


def test_its_random_words_are_the_generators(kernels: Library) -> None:
    for seed, position in ((0, 0), (2**64 - 1, 2**33 + 5), (2**63 + 12345, 17), (2**32, 2**40)):
        expected = uniforms(seed, NoiseStream.CHOICE, position, np.arange(4096))
        words = words_of(kernels, seed, position, 4096).astype(np.float64)
        assert np.array_equal((words + 0.5) / 2.0**32, expected)


def test_its_noise_is_as_exact_as_it_says(kernels: Library) -> None:
    """Every word at both ends, around the places where the formula changes, and a million others."""
    edges = [0, 2**30, 2**31, 3 * 2**30, 2**32 - 1]
    near = [np.arange(edge - 2**17, edge + 2**17) for edge in edges]
    # Where a logarithm's mantissa jumps: sqrt(1/2) times a power of 2, and e to its powers.
    jumps = [
        *(2**32 * 0.5**0.5 * 2.0**-power for power in range(20)),
        *(2**32 * np.exp(-(2.0**power)) for power in range(-9, 4)),
    ]
    near += [np.arange(int(jump) - 64, int(jump) + 64) for jump in jumps]
    near.append(np.random.default_rng(1).integers(0, 2**32, 2**20))
    words = np.concatenate(near)
    words = words[(words >= 0) & (words < 2**32)].astype(np.uint32)
    words = words[: len(words) // 32 * 32]
    exact = -np.log(-np.log((words.astype(np.float64) + 0.5) / 2.0**32))
    assert np.abs(noise_of(kernels, words) - exact).max() < NOISE_ERROR


def test_it_is_the_same_on_every_instruction_set() -> None:
    here = all_here()
    if len(here) < 2:
        pytest.skip("fewer than two instruction sets here")
    source, words = random.Random(1), np.random.default_rng(2).integers(0, 2**32, 2**16).astype(np.uint32)
    assert all(np.array_equal(noise_of(one, words), noise_of(here[0], words)) for one in here)
    decided = 0
    for _ in range(40):
        vocabulary = source.choice([64, 1000, 6407])
        logits = random_logits(source, 9, vocabulary)
        points = points_of([random_params(source, vocabulary) for _ in logits])
        first, *others = (ChoiceKernel(one).choose(logits, points) for one in here)
        assert all(choices == first for choices in others)
        decided += sum(choice != UNDECIDED for choice in first)
    assert decided > 200


def test_most_choices_are_its_own(kernels: Library) -> None:
    """Of ordinary distributions; and rows may lie apart, as where a vocabulary fills no panel."""
    made, asked = ChoiceKernel(kernels), 0
    for seed, params in enumerate(
        [
            SamplingParams(temperature=1.0),
            SamplingParams(temperature=0.8, top_p=0.9),
            SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.2),
            SamplingParams(temperature=1.0, top_k=40),
            SamplingParams(temperature=1.3, top_k=300, top_p=0.95, min_p=0.01),
            SamplingParams(repetition_penalty=1.3, logit_bias={7: 3.0}),
        ]
    ):
        logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 2.5, (50, 6432)).astype(np.float32))[:, :6407]
        points = points_of([replace(params, seed=at) for at in range(50)])
        choices = made.choose(logits, points)
        assert choices == made.choose(logits.contiguous(), points)
        assert [made.choose(logits, [point])[0] for point in points[:5]] == choices[:5]
        asked += choices.count(UNDECIDED)
    assert asked < 6


def test_a_close_race_is_left_to_the_law(kernels: Library) -> None:
    """A token whose logit plus noise is as good as the winner's."""
    made, params = ChoiceKernel(kernels), SamplingParams(temperature=1.0, seed=3)
    logits = torch.full((1, 64), -50.0)
    noise = -np.log(-np.log(uniforms(3, NoiseStream.CHOICE, 3, np.arange(64))))
    logits[0, 4], logits[0, 9] = float(-noise[4]), float(-noise[9])
    (point,) = points_of([params])
    assert made.choose(logits, [point]) == [UNDECIDED]
    logits[0, 9] += 0.01
    assert made.choose(logits, [point]) == [9] == [choose(logits[0], params, 3, 3)]


def test_what_it_cannot_read_is_refused(kernels: Library) -> None:
    made, points = ChoiceKernel(kernels), points_of([SamplingParams(temperature=1.0)] * 2)
    for logits, reason in (
        (torch.zeros(2, 64, dtype=torch.float64), "must be float32"),
        (torch.zeros(64, 2).T, "side by side"),
        (torch.zeros(1, 64), "row is 1: there are 1"),
    ):
        with pytest.raises(ValueError, match=reason):
            made.choose(logits, points)
    # Tokens beyond the vocabulary must not be written to.
    beyond = points_of(
        [SamplingParams(temperature=1.0, logit_bias={64: 1.0}), SamplingParams(repetition_penalty=2.0)], (1, 70)
    )
    assert made.choose(torch.zeros(2, 64), beyond) == [UNDECIDED, UNDECIDED]


WRONG = {
    "another key": ("key1 + 0xbb67ae85u", "key1 + 0xbb67ae84u"),
    "noise of half the size": ("first - top + gumbel", "first - top + 0.5f * gumbel"),
    "penalties the wrong way": ("logit < 0.0f ?", "logit > 0.0f ?"),
    "no presence": ("request->presence + request", "request"),
    "one token more than top-k": ("length, request->top_k, top", "length, request->top_k + 1, top"),
    "a wider nucleus": ("1.0 - (double)request->outside", "1.0 - 0.7 * (double)request->outside"),
    "twice the min-p": ("ratio = (float)found.own", "ratio = 0.5f * (float)found.own"),
    "the temperature twice": ("some / spread(temperature)", "some / spread(temperature * temperature)"),
    "the last of equals": ("while (row[i] != top) i++;", "while (row[i] != top) i++; while (row[i + 1] == top) i++;"),
}


@pytest.mark.examples(3)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_kernel_is_caught(wrong: str, tmp_path: Path) -> None:
    # Choosers also look for the kernel that finds the likeliest ids.
    planted = planted_kernels("choose.c", WRONG[wrong], tmp_path, beside=["likeliest.c"])
    with pytest.raises(AssertionError):
        check_all(range(8), planted)


def test_all_parameters_at_once(kernels: Library) -> None:
    """Random cases seldom have them all."""
    source, decided = random.Random(9), 0
    for _ in range(30):
        case = random_case(source, 1000)
        params = replace(
            case.params, temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.3
        )
        case = replace(case, params=params)
        found = outcomes([case], kernels)[0]
        assert found.choices[0] == case.choice(0)
        request = RequestState(Sampling(params=params, prompt_length=len(case.prompt)), EOS, NONE)
        request.advance(0, case.text)
        own = ChoiceKernel(kernels).choose(case.logits[:1], [ChoicePoint(request, 0, len(case.text), ())])[0]
        decided += own == case.choice(0)
    assert decided > 15


def test_few_rows_are_chosen_by_one_thread(kernels: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one would be waited for wherever another process has its core."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    made = ChoiceKernel(kernels)
    choose, threads = made._choose, []

    def counting(*args: object) -> None:
        threads.append(args[5])
        choose(*args)

    made._choose = counting  # type: ignore[assignment]
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 2.5, (70, 640)).astype(np.float32))
    points = points_of([SamplingParams(temperature=1.0, seed=at) for at in range(70)])
    all_at_once = made.choose(logits, points)
    assert made.choose(logits, points[:32]) == all_at_once[:32]
    assert threads == [2, 1]
