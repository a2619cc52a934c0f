"""The likeliest tokens where the logits are, by one kernel of ours: torch's functions' and the law's, also from a graph."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.verifier.choosing import device_trials
from services.verifier.choosing.chooser import Chooser
from services.verifier.choosing.greatest import TOKENS, Finder, by_torch, finder_on, is_right, own_kernel, trial_rows
from services.verifier.choosing.reading import LogitsReader
from services.verifier.config import TargetConfig
from services.verifier.model.means import TargetMeans
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import NOT_CHOSEN, Rows, Sampling
from speculation.types import SamplingParams
from tests.engine.choices import ELSEWHERE, check
from tests.tiny_models.tiny import make_tiny_model

pytest.importorskip("triton")
from services.verifier.kernels.triton import choice_kernels
from tests.kernels.triton_interpreter import hopper

first_of_greatest, BLOCK = choice_kernels.first_of_greatest, choice_kernels._BLOCK
VOCABULARIES = (1, 17, 1000, BLOCK, BLOCK + 1, 49152, 128256)


def rows_of(vocabulary: int) -> torch.Tensor:
    """Random rows; then ties, at the borders of blocks above all; both zeros; and rows in which nothing can be chosen."""
    source = np.random.default_rng(vocabulary)
    rows = torch.from_numpy(source.normal(0, 2, (24, vocabulary)).astype(np.float32))
    ends = [at for border in range(0, vocabulary + 1, BLOCK) for at in (border - 1, border)]
    borders = sorted({at for at in (*ends, 0, vocabulary // 2, vocabulary - 1) if 0 <= at < vocabulary})
    rows[1], rows[2] = 1.5, -1e30
    for row in range(3, 10):
        rows[row, sorted(source.choice(borders, min(len(borders), row), replace=False))] = 30.0
    # Rounded, so that many are equal.
    rows[10:12] = rows[10:12].round()
    for row, (first, second) in ((12, (-0.0, 0.0)), (13, (0.0, -0.0)), (14, (-0.0, -0.0))):
        rows[row] = -rows[row].abs() - 1
        rows[row, borders[-1]], rows[row, borders[len(borders) // 2]] = second, first
    rows[15], rows[15, borders[-1]] = -math.inf, -7.0
    rows[16], rows[17, borders[-1]], rows[18, 0] = -math.inf, math.inf, math.nan
    rows[19, borders[-1]], rows[20] = -math.nan, math.nan
    rows[21, 0], rows[21, borders[-1]] = math.inf, math.nan
    # Subnormal numbers, and the greatest there are.
    rows[22] = torch.from_numpy(source.integers(0, 9, vocabulary).astype(np.float32)) * 1e-45
    rows[23, borders[len(borders) // 2]] = torch.finfo(torch.float32).max
    return rows


@pytest.mark.exhaustive
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_it_finds_what_torchs_functions_and_the_law_do(vocabulary: int) -> None:
    rows = rows_of(vocabulary)
    found, expected = first_of_greatest(rows), by_torch(rows)
    assert found.dtype == torch.int64 and torch.equal(found, expected)
    best = np.where(np.isnan(rows.numpy()), np.inf, rows.numpy()).max(1)
    law = [int(row.argmax()) if math.isfinite(top) else NOT_CHOSEN for row, top in zip(rows.numpy(), best, strict=True)]
    assert found.tolist() == law
    assert law.count(NOT_CHOSEN) >= 5
    # A row alone, and rows that do not lie one after the other.
    assert first_of_greatest(rows[3:4]).tolist() == law[3:4]
    assert first_of_greatest(rows[::2]).tolist() == law[::2]


@pytest.mark.parametrize("vocabulary", [17, BLOCK + 1, 49152])
def test_logits_as_a_model_makes_them(vocabulary: int) -> None:
    """The choice is that after their conversion to float32, which keeps order and equality."""
    rows = rows_of(vocabulary).bfloat16()
    with hopper():
        assert torch.equal(first_of_greatest(rows), by_torch(rows.float()))


# As if the logits lay on a device where our kernel runs.
OURS = replace(ELSEWHERE, first_of_greatest=first_of_greatest)


class Counting:
    """Finds them by torch's functions, and counts the rows that it is asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.reader = replace(ELSEWHERE, first_of_greatest=self._find)

    def _find(self, logits: torch.Tensor) -> torch.Tensor:
        self.asked.append(len(logits))
        return by_torch(logits)


def test_choices_by_it_are_the_laws() -> None:
    assert sum(check(seed, 3, reader=OURS) for seed in range(3)) > 50


def test_a_kernel_that_is_wrong_or_fails_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def used(finder: Finder) -> bool:
        kernel = own_kernel(torch.device("cuda"), lambda: finder, lambda own: is_right(own, trial_rows()), TOKENS)
        assert kernel in (None, finder)
        return kernel is not None

    assert finder_on(torch.device("cpu")) is None
    assert not used(lambda logits: 1 / 0) and "ZeroDivisionError" in caplog.text  # type: ignore[arg-type, return-value]
    wrong: list[Finder] = [
        lambda logits: logits.argmax(-1),
        lambda logits: torch.where(by_torch(logits) == 77, 3000, by_torch(logits)),
        lambda logits: by_torch(logits.nan_to_num(-9.0)),
    ]
    for finder in wrong:
        caplog.clear()
        assert not used(finder)
        assert "the likeliest tokens are found by torch's functions" in caplog.text and "other tokens" in caplog.text
    assert used(by_torch)


def test_tokens_that_the_pass_has_found_are_not_looked_for() -> None:
    """Greedy requests take them; others do not; where there is none, the law is asked for the row."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    logits[4, 7] = math.nan
    params = {
        "greedy": SamplingParams(),
        "drawn": SamplingParams(temperature=1.0, seed=3),
        "penalised": SamplingParams(repetition_penalty=1.5),
        "spoilt": SamplingParams(),
    }
    counting = Counting()
    made = Chooser(reader=counting.reader)
    for name, own in params.items():
        made.open(name, Sampling(params=own, prompt_length=1), [1])
    batch = [Rows(request_id="greedy", context=1, tokens=(4, int(logits[0].argmax()), 9), parents=(-1, 0), logits=3)]
    batch += [Rows(request_id=name, context=1, tokens=(4,), logits=1) for name in ("drawn", "spoilt", "penalised")]
    plain = made.outcomes(batch, logits)
    asked: list[int] = []

    def found() -> list[int]:
        asked.append(1)
        return by_torch(logits).tolist()

    counting.asked.clear()
    given = made.outcomes(batch, logits, found)
    assert [one.choices for one in given] == [one.choices for one in plain]
    assert given[0].choices[:2] == tuple(logits[:2].argmax(-1).tolist())
    assert str(given[2].error) == str(plain[2].error) and given[2].choices == (NOT_CHOSEN,)
    assert asked == [1] and counting.asked == [1], "once for all rows; by itself for the penalised one alone"
    # They are believed.
    assert made.outcomes(batch[:1], logits, lambda: [11] * 6)[0].choices[0] == 11
    # And nobody waits for them in vain.
    made.outcomes([replace(batch[1])], logits[3:4], lambda: pytest.fail("nobody needs them"))


def choices(target: TransformersTarget) -> Iterator[Any]:
    """Of a prompt beside a shorter one, of two trees, and of a pass that no graph holds."""
    part = target._part
    for name in "ab":
        assert target.open(name, 400)
    source = random.Random(0)

    def made(*batch: Rows) -> Any:
        target.begin(batch)
        return [outcome.choices for outcome in target.finish()], part.likeliest is not None

    chain = [source.randrange(target.vocab_size) for _ in range(40)]
    # Only the last row of a prompt is chosen after, and none of one that goes on.
    yield made(
        Rows(request_id="a", context=0, tokens=tuple(chain), logits=1),
        Rows(request_id="b", context=0, tokens=tuple(chain[:9]), logits=0),
    )
    trees = [
        Rows(request_id=name, context=at, tokens=(5, *range(6)), parents=(-1, -1, 0, 1, 2, 0), logits=7)
        for name, at in (("a", 40), ("b", 9))
    ]
    yield made(*trees)
    yield made(Rows(request_id="a", context=40, tokens=tuple(chain) * 8, logits=1))


def test_graphs_find_them(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    settings = TargetConfig(model_path=str(tmp_path), kv_cache_tokens=2048, max_model_len=512, kernels="torch")
    counting = Counting()

    def made(find: Finder | None, reader: LogitsReader = OURS) -> TransformersTarget:
        return TransformersTarget(settings, means=TargetMeans(find=lambda device: find, reader=reader))

    ordinary, captured, torchs = made(None), made(first_of_greatest, counting.reader), made(None)
    for target in (captured, torchs):
        target._part._graphs = target._part._captured(replace(target._config, pass_requests=2))
    expected = list(choices(ordinary))
    assert [found for _, found in expected] == [False, False, False]
    assert list(choices(torchs)) == expected
    counting.asked.clear()
    held = list(choices(captured))
    assert [made for made, _ in held] == [made for made, _ in expected]
    assert [found for _, found in held] == [True, True, False]
    assert counting.asked == [1], "after the pass that no graph holds"


def test_the_rejection_rule_takes_it() -> None:
    counting, logits = Counting(), rows_of(1000)[:3]
    found = device_trials.tried_on(
        logits, [SamplingParams()] * 3, [1, 2, 3], [device_trials.Fan((), ())] * 3, counting.reader
    )
    assert [one.drawn for one in found] == by_torch(logits).tolist() and counting.asked == [3]
    found = device_trials.tried_on(logits, [SamplingParams()] * 3, [1, 2, 3], [device_trials.Fan((), ())] * 3, OURS)
    assert [one.drawn for one in found] == by_torch(logits).tolist()
