"""The likeliest tokens where the logits are, by one kernel of ours: torch's functions' and the law's, also from a graph."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.verifier.choosing import candidates, chooser, device_trials, greatest, penalties, picks
from services.verifier.choosing.chooser import Chooser
from services.verifier.choosing.greatest import by_torch
from services.verifier.config import TargetConfig
from services.verifier.model import slice as model_slice
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import NOT_CHOSEN, Rows, Sampling
from speculation.types import SamplingParams
from tests.choices import check
from tests.tiny import make_tiny_model

pytest.importorskip("triton")
from services.verifier.kernels.triton import choice_kernels
from tests.triton_interpreter import hopper

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


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the logits lay on a device where our kernel runs."""
    for module in (candidates, chooser, penalties, picks):
        monkeypatch.setattr(module, "on_host", lambda logits: False)
    monkeypatch.setattr(greatest, "finder_on", lambda device: first_of_greatest)


@pytest.mark.usefixtures("ours")
def test_choices_by_it_are_the_laws() -> None:
    assert sum(check(seed, 3) for seed in range(3)) > 50


def test_a_kernel_that_is_wrong_or_fails_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Device:
        """Says that it is a GPU; what is put there stays here."""

        type = "cuda"

    finder_on = greatest.finder_on.__wrapped__
    assert finder_on(torch.device("cpu")) is None
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_, **__: self)
    monkeypatch.setattr(choice_kernels, "first_of_greatest", lambda logits: 1 / 0)
    assert finder_on(Device()) is None and "ZeroDivisionError" in caplog.text
    wrong: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda logits: logits.argmax(-1),
        lambda logits: torch.where(by_torch(logits) == 77, 3000, by_torch(logits)),
        lambda logits: by_torch(logits.nan_to_num(-9.0)),
    ]
    for finder in wrong:
        caplog.clear()
        monkeypatch.setattr(choice_kernels, "first_of_greatest", finder)
        assert finder_on(Device()) is None
        assert "the likeliest tokens are found by torch's functions" in caplog.text and "other tokens" in caplog.text
    monkeypatch.setattr(choice_kernels, "first_of_greatest", by_torch)
    assert finder_on(Device()) is by_torch


@pytest.mark.usefixtures("ours")
def test_tokens_that_the_pass_has_found_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy requests take them; others do not; where there is none, the law is asked for the row."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    logits[4, 7] = math.nan
    params = {
        "greedy": SamplingParams(),
        "drawn": SamplingParams(temperature=1.0, seed=3),
        "penalised": SamplingParams(repetition_penalty=1.5),
        "spoilt": SamplingParams(),
    }
    made = Chooser()
    for name, own in params.items():
        made.open(name, Sampling(params=own, prompt_length=1), [1])
    batch = [Rows(request_id="greedy", context=1, tokens=(4, int(logits[0].argmax()), 9), parents=(-1, 0), logits=3)]
    batch += [Rows(request_id=name, context=1, tokens=(4,), logits=1) for name in ("drawn", "spoilt", "penalised")]
    plain = made.outcomes(batch, logits)
    asked: list[int] = []

    def found() -> list[int]:
        asked.append(1)
        return by_torch(logits).tolist()

    looked_for: list[int] = []
    monkeypatch.setattr(picks, "likeliest_of", lambda rows: looked_for.append(len(rows)) or by_torch(rows).tolist())
    given = made.outcomes(batch, logits, found)
    assert [one.choices for one in given] == [one.choices for one in plain]
    assert given[0].choices[:2] == tuple(logits[:2].argmax(-1).tolist())
    assert str(given[2].error) == str(plain[2].error) and given[2].choices == (NOT_CHOSEN,)
    assert asked == [1] and looked_for == [1], "once for all rows; by itself for the penalised one alone"
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


@pytest.mark.usefixtures("ours")
def test_graphs_find_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model(tmp_path)
    settings = TargetConfig(model_path=str(tmp_path), kv_cache_tokens=2048, max_model_len=512, kernels="torch")
    ordinary, captured, torchs = (TransformersTarget(settings) for _ in range(3))
    monkeypatch.setattr(model_slice, "finder_on", lambda device: first_of_greatest)
    captured._part._graphs = captured._part._captured(replace(captured._config, pass_requests=2))
    monkeypatch.setattr(model_slice, "finder_on", lambda device: None)
    torchs._part._graphs = torchs._part._captured(replace(torchs._config, pass_requests=2))
    expected = list(choices(ordinary))
    assert [found for _, found in expected] == [False, False, False]
    assert list(choices(torchs)) == expected
    looked_for: list[int] = []
    monkeypatch.setattr(picks, "likeliest_of", lambda rows: looked_for.append(len(rows)) or by_torch(rows).tolist())
    held = list(choices(captured))
    assert [made for made, _ in held] == [made for made, _ in expected]
    assert [found for _, found in held] == [True, True, False]
    assert looked_for == [1], "after the pass that no graph holds"


def test_the_rejection_rule_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(
        greatest, "finder_on", lambda device: lambda rows: called.append(len(rows)) or first_of_greatest(rows)
    )
    logits = rows_of(1000)[:3]
    found = device_trials.tried_on(logits, [SamplingParams()] * 3, [1, 2, 3], [device_trials.Fan((), ())] * 3)
    assert [one.drawn for one in found] == by_torch(logits).tolist() and called == [3]
