"""Choices where the logits are: the law's, id for id; hardly anything but ids comes to the host; faults are seen."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from services.verifier.choosing import chosen_logprobs, device_choice, picks, point_choices
from services.verifier.choosing.device_choice import Limits, drawn, limits_of, winners_by_torch, words
from services.verifier.choosing.processors import build_truncation
from services.verifier.model.target_port import NOT_CHOSEN
from speculation.choose import choose, log_probabilities
from speculation.philox import NoiseStream
from speculation.types import SamplingParams
from tests.engine.choices import ELSEWHERE, check_all, outcomes, random_case, random_logits, random_params, wider


def kept_by_transformers(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    truncation = build_truncation(params)
    return (row if truncation is None else truncation(row, ())) > -torch.inf


def test_what_is_left_lies_between_the_limits() -> None:
    source, at_the_limit, left = random.Random(3), 0, 0
    for _ in range(80):
        vocabulary = source.choice([64, 1000, 2000])
        params = [replace(random_params(source, vocabulary), temperature=1.0) for _ in range(3)]
        logits = random_logits(source, 3, vocabulary)
        limits = limits_of(logits, params)
        for row, own, perhaps, surely in zip(logits, params, *limits, strict=True):
            kept, possible = kept_by_transformers(row, own), row > -torch.inf
            assert not (kept & (row.double() < perhaps)).any(), own
            assert not (~kept & possible & (row.double() >= surely)).any(), own
            left += int(kept.sum())
            at_the_limit += int((possible & (row.double() >= perhaps) & (row.double() < surely)).sum())
    # Among them tokens whose logits are all equal.
    assert at_the_limit < left / 4


def test_hardly_any_row_is_left_to_the_law() -> None:
    """Of rows like a model's, where top-p, min-p and top-k leave tens to thousands of tokens."""
    seeded, source, undecided, count = np.random.default_rng(2), random.Random(2), 0, 0
    for _ in range(20):
        logits = torch.from_numpy(seeded.normal(0, 2.5, (8, 2048)).astype(np.float32))
        params = [
            SamplingParams(
                temperature=1.0, top_p=source.choice([0.8, 0.95, 1.0]), top_k=source.choice([0, 50]),
                min_p=source.choice([0.0, 0.05]), seed=source.randrange(2**64),
            )
            for _ in logits
        ]  # fmt: skip
        found = drawn(logits, params, range(8))
        for row, own, position, token in zip(logits, params, range(8), found, strict=True):
            count += 1
            undecided += token == NOT_CHOSEN
            if token != NOT_CHOSEN:
                kept = kept_by_transformers(row, own)
                assert token == choose(row.masked_fill(~kept, -torch.inf), own, own.seed, position)
    assert undecided <= count / 80


def test_what_rounding_could_decide_is_left_to_the_law() -> None:
    """Equal logits on both sides of a limit, and two tokens whose sums with their noise are as good as equal."""
    params = SamplingParams(temperature=1.0, top_p=0.6, seed=1)
    assert drawn(torch.zeros(1, 4), [params], [0]) == [NOT_CHOSEN]
    assert drawn(torch.tensor([[0.0, -torch.inf], [torch.nan, 1.0]]), [params] * 2, [0, 0]) == [0, NOT_CHOSEN]
    limits = limits_of(torch.tensor([[0.0, np.log(np.float32(0.5)), -9.0]]), [SamplingParams(temperature=1.0, min_p=0.5)])
    assert float(limits.perhaps) < np.log(0.5) < float(limits.surely) < 0
    uniform = (words([1], device_choice.NoiseStream.CHOICE, [5], 2, torch.device("cpu")).double() + 0.5) / 2.0**32
    noise = -torch.log(-torch.log(uniform))[0]
    near = torch.tensor([[0.0, float(noise[0] - noise[1])]])
    assert drawn(near, [SamplingParams(temperature=1.0, seed=1)], [5]) == [NOT_CHOSEN]


def _last_of_equals(logits: torch.Tensor) -> torch.Tensor:
    return logits.shape[1] - 1 - logits.flip(1).argmax(1)


def _later(seeds: Any, stream: Any, positions: Any, *rest: Any) -> torch.Tensor:
    return words(seeds, stream, [position + 1 for position in positions], *rest)


def _wider(logits: torch.Tensor, params: Any) -> Limits:
    return limits_of(logits, [wider(own) for own in params])


def _careless(logits: torch.Tensor, params: Any) -> Limits:
    """Rounding is taken never to matter."""
    made = limits_of(logits, params)
    return Limits(made.perhaps, torch.full_like(made.surely, -torch.inf))


def _ours(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our kernel, through Triton's interpreter, in the place of torch's functions."""
    pytest.importorskip("triton")
    from services.verifier.kernels.triton import choice_kernels

    monkeypatch.setattr(device_choice, "winners_on", lambda device: choice_kernels.noisy_winners)
    return choice_kernels


def test_one_kernel_draws_as_torchs_functions_do(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, source = _ours(monkeypatch), random.Random(4)
    for vocabulary in (5, 37, 2500):
        logits = random_logits(source, 6, vocabulary)
        perhaps = torch.tensor([-torch.inf, -1.0, 0.5, 1.0, -torch.inf, 1e9], dtype=torch.float64)
        seeds = [0, 2**64 - 1, 2**63 + 12345, *(source.randrange(2**64) for _ in range(3))]
        stream = source.choice([NoiseStream.CHOICE, NoiseStream.RESIDUAL])
        # What is left of distributions comes as doubles.
        given = (logits.double() if vocabulary == 37 else logits, perhaps, seeds, [0, 2**33 + 5, 17, 1, 2, 3], stream)
        # Parts of a vocabulary begin anywhere in a block of noise.
        for first in (0, 1, 4, 1023):
            found, expected = kernel.noisy_winners(*given, first), winners_by_torch(*given, first)
            some = torch.isfinite(expected[0])
            assert torch.equal(found[1][some], expected[1][some])
            assert torch.allclose(found[0], expected[0], atol=1e-9) and torch.allclose(found[2], expected[2], atol=1e-9)


def test_the_noise_of_a_part_is_that_of_its_tokens() -> None:
    source = random.Random(5)
    logits, nothing = random_logits(source, 3, 400), torch.full((3,), -torch.inf, dtype=torch.float64)
    seeds, positions = [1, 2, 2**63], [4, 5, 2**40]
    for first in (0, 3, 101, 256):
        others = torch.full_like(logits, -torch.inf)
        others[:, first : first + 90] = logits[:, first : first + 90]
        whole = winners_by_torch(others, nothing, seeds, positions, NoiseStream.CHOICE)
        own = winners_by_torch(logits[:, first : first + 90], nothing, seeds, positions, NoiseStream.CHOICE, first)
        some = torch.isfinite(own[0])
        assert torch.equal(own[0], whole[0]) and torch.equal((own[1] + first)[some], whole[1][some])


@pytest.mark.exhaustive
def test_the_kernels_choices_are_the_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, source = _ours(monkeypatch), random.Random(12)

    def agree() -> bool:
        batch = [random_case(source, source.choice([37, 1000])) for _ in range(3)]
        wanted = [
            [case.choice(row) if row in case.reached() else NOT_CHOSEN for row in range(len(case.logits))] for case in batch
        ]
        return all(
            list(made.choices) == own
            for case, own in zip(batch, wanted, strict=True)
            for made in outcomes([case], reader=ELSEWHERE)
        )

    assert all(agree() for _ in range(6))
    nan = torch.zeros(1, 37)
    nan[0, 5] = torch.nan
    assert drawn(nan, [SamplingParams(temperature=1.0)], [0]) == [NOT_CHOSEN]
    # A fault: keys in another order.
    noisy = kernel.noisy_rows
    monkeypatch.setattr(kernel, "noisy_rows", _Swapped(noisy))
    assert not all(agree() for _ in range(6))


class _Swapped:
    """Launches a kernel with the halves of seeds swapped."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(logits: Any, limits: Any, keys: torch.Tensor, *rest: Any, **constants: Any) -> None:
            self._kernel[grid](logits, limits, keys[:, [1, 0, 2, 3]].contiguous(), *rest, **constants)

        return launch


def test_a_kernel_that_is_wrong_or_fails_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")

    class Device:
        """Says that it is a GPU; what is put there stays here."""

        type = "cuda"

    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_, **__: self)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **named: zeros(*size, **named))
    assert device_choice.winners_on(torch.device("cpu")) is winners_by_torch

    def tried(winners: Any) -> Any:
        return device_choice.right_winners(Device(), lambda: winners)  # type: ignore[arg-type]

    assert tried(lambda *given: 1 / 0) is winners_by_torch and "ZeroDivisionError" in caplog.text
    wrong = lambda *given: tuple(part.flip(0) for part in winners_by_torch(*given))  # noqa: E731
    assert tried(wrong) is winners_by_torch and "it finds other tokens" in caplog.text
    right = lambda *given: winners_by_torch(*given)  # noqa: E731
    assert tried(right) is right


WRONG: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "another position": (device_choice, "words", _later),
    "a wider nucleus": (device_choice, "limits_of", _wider),
    "rounding never matters": (device_choice, "limits_of", _careless),
    "another temperature": (
        point_choices,
        "sample",
        lambda logits, points, reader: picks.sample(logits * 1.02, points, reader),
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_choice_on_a_device_is_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, replacement = WRONG[wrong]
    monkeypatch.setattr(module, name, replacement)
    with pytest.raises(AssertionError):
        check_all(range(100, 108), reader=ELSEWHERE)


def test_the_last_of_equals_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_all(range(100, 108), reader=replace(ELSEWHERE, first_of_greatest=_last_of_equals))


class Elsewhere(torch.Tensor):
    """Counts the numbers that are taken to the host; what is computed from it is elsewhere, too."""

    taken = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = ("cpu", "numpy", "tolist", "item", "__bool__", "__float__", "__int__", "__index__", "__array__")
        if getattr(func, "__name__", "") in leaves:
            Elsewhere.taken += args[0].numel()
        return super().__torch_function__(func, types, args, kwargs or {})


def test_hardly_anything_but_ids_comes_to_the_host() -> None:
    """Greedy and drawn rows, with penalties, a bias and truncation; then log-probabilities, which are asked for."""
    source, rows = random.Random(9), 0
    batch = []
    for at in range(12):
        drawn_at = {} if at % 2 else {"temperature": 0.8, "top_p": 0.9, "top_k": 0 if at % 4 else 40, "min_p": 0.01}
        params = SamplingParams(
            **drawn_at, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={3: 2.0}, seed=at, logprobs=at % 3
        )  # type: ignore[arg-type]
        case = random_case(source, 6400)
        logits = torch.from_numpy(np.random.default_rng(at).normal(0, 2, tuple(case.logits.shape)).astype(np.float32))
        batch.append(replace(case, params=params, logits=logits.as_subclass(Elsewhere)))
        rows += len(logits)
    Elsewhere.taken = 0
    made = outcomes(batch, reader=ELSEWHERE, top_k=4)
    assert 0 < Elsewhere.taken <= rows * (1 + 4)
    Elsewhere.taken = 0
    for outcome in made:
        assert outcome.logprobs is not None
        for row, token in enumerate(outcome.choices):
            assert token == NOT_CHOSEN or outcome.logprobs(row, token).token_id == token
    assert 0 < Elsewhere.taken <= rows * (1 + 2 * 2)


def test_log_probabilities_of_a_pass_take_one_copy_for_each_number_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    some = chosen_logprobs._some
    monkeypatch.setattr(chosen_logprobs, "_some", lambda *given: calls.append(given[2]) or some(*given))
    source = random.Random(6)
    batch = [replace(random_case(source, 1000), params=SamplingParams(logprobs=at % 2)) for at in range(6)]
    made = outcomes(batch)
    for case, outcome in zip(batch, made, strict=True):
        assert outcome.logprobs is not None
        for row in (row for row, token in enumerate(outcome.choices) if token != NOT_CHOSEN):
            token = outcome.choices[row]
            assert outcome.logprobs(row, token) == log_probabilities(case.logits[row], token, case.params.logprobs or 0)
        # Not chosen, and still answered.
        assert outcome.logprobs(0, 7) == log_probabilities(case.logits[0], 7, case.params.logprobs or 0)
    assert sorted(calls) == [0, 1]
