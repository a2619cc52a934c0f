"""Rows of noise in a target that is split over stages and ranks: the bits of one process, in every row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from services.verifier.checks.noise_guesses import guess_behind_noise
from services.verifier.model.slice import ModelSlice
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from services.verifier.stages.orders import Orders
from speculation.errors import ConfigurationError
from tests.engine.stage_threads import parts_noted, targets_of_ranks
from tests.kernels.kernels_here import needs_kernels
from tests.lossless import test_tensor_parallel as parallel
from tests.lossless.test_lora_in_stages import config
from tests.lossless.test_uno import NODES, begun, computed, last_pass
from tests.running.refusals import refuses
from tests.tiny_models.lora import ALL, CONFIG, make_adapter, read_config, write_config
from tests.tiny_models.tiny import make_tiny_model

pytestmark = [
    needs_kernels,
    pytest.mark.xdist_group("uno"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), **{**parallel.SIZES, "num_hidden_layers": 2})


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("uno") / "adapter", model, seed=8, size=0.2, targets=(*ALL, "lm_head"))


@pytest.fixture(scope="module")
def billing(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An adapter that requests may have."""
    return {"billing": str(make_adapter(tmp_path_factory.mktemp("of requests") / "billing", model, seed=3))}


@pytest.fixture(scope="module")
def whole(model: Path, adapter: Path, billing: dict[str, str]) -> TransformersTarget:
    return TransformersTarget(config(model, 1, draft_adapter=adapter, lora_modules=billing))


Make = Callable[..., TransformersTarget]


@pytest.fixture
def make(model: Path) -> Iterator[Make]:
    with targets_of_ranks(partial(config, model)) as of:
        yield of


def said(target: TransformersTarget) -> list[torch.Tensor]:
    """Of a pass with noise: alone, in an answer with an adapter, and beside other requests, with noise and without."""
    alone, adapted = computed(target, last_pass()), computed(target, last_pass(), "billing")
    batch = [last_pass("plain", noise=False), last_pass(), last_pass("adapted")]
    for rows in batch:
        begun(target, rows.request_id, "billing" if rows.request_id == "adapted" else "")
    beside = target.forward(batch)
    for rows in batch:
        target.close(rows.request_id)
    return [alone, adapted, *beside]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


# Ranks and stages.
@pytest.mark.parametrize(("ranks", "stages"), [(1, 2), (2, 1), pytest.param(2, 2, marks=pytest.mark.exhaustive)])
def test_the_same_bits_as_in_one_process(
    make: Make, whole: TransformersTarget, adapter: Path, billing: dict[str, str], ranks: int, stages: int
) -> None:
    wanted = said(whole)
    split = make(ranks, stages, draft_adapter=adapter, lora_modules=billing)
    assert same(said(split), wanted)
    # The canary's guesses, too.
    noise = [(200, 13), (77, 150)] * 12
    assert all(
        torch.equal(*(guess_behind_noise(each, range(5, 40), 3, noise, adapted) for each in (split, whole)))
        for adapted in (True, False)
    )
    # Requests may not have the adapter of noise.
    assert split.adapters == whole.adapters and list(split.adapters) == ["billing"]
    # And again, from stages that take the place of lost ones.
    split.recover()
    assert same(said(split), wanted)


def test_weights_of_eight_bits(make: Make, model: Path, adapter: Path, billing: dict[str, str]) -> None:
    alone = TransformersTarget(config(model, 1, dtype="int8", draft_adapter=adapter, lora_modules=billing))
    plain = TransformersTarget(config(model, 1, dtype="int8"))
    wanted, own = said(alone), 1 + len(NODES)
    assert torch.equal(wanted[0][:own], computed(plain, last_pass(noise=False)))
    assert not torch.isclose(wanted[0][own:], computed(plain, last_pass())[own:]).all()
    assert same(said(make(1, 2, dtype="int8", draft_adapter=adapter, lora_modules=billing)), wanted)


def test_a_stage_that_knows_of_no_noise_would_be_seen(
    make: Make, whole: TransformersTarget, adapter: Path, billing: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Orders.run
    monkeypatch.setattr(
        Orders, "run", lambda own, batch, *told: run(own, [replace(rows, noise=()) for rows in batch], *told)
    )
    found, wanted = said(make(1, 2, draft_adapter=adapter, lora_modules=billing)), said(whole)
    own = 1 + len(NODES)
    assert torch.equal(found[0][:own], wanted[0][:own]) and not torch.isclose(found[0][own:], wanted[0][own:]).all()


def test_stages_read_the_same_adapter_or_none(
    make: Make, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_adapter(tmp_path / "adapter", model, seed=8, size=0.2)
    parts: list[ModelSlice] = parts_noted(monkeypatch)
    split = make(1, 2, draft_adapter=folder)
    following = Rows(request_id="r", context=0, tokens=(5, 6, 7), logits=1)
    assert split.open("r", 64)
    before = split.forward([following])[0]
    split.close("r")
    assert [part.adapters is not None and part.adapters.of_noise is not None for part in parts] == [True]
    write_config(folder, {**read_config(folder), "lora_alpha": 9})
    split.recover()
    assert "cannot load the adapter of rows of noise again" in caplog.text
    # Answers do without it.
    assert split.open("r", 64)
    assert torch.equal(split.forward([following])[0], before)
    (folder / CONFIG).unlink()
    with refuses(ConfigurationError, CONFIG):
        make(1, 2, draft_adapter=folder)
