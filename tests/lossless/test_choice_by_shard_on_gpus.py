"""Ranks on GPUs choose each in its part of the vocabulary, in Triton's interpreter: the tokens of one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

pytest.importorskip("triton")
from services.verifier.choosing import best_of_shards, device_parts
from services.verifier.choosing.chooser import Chooser
from services.verifier.choosing.device_parts import DevicePartFinder, over_ranks
from services.verifier.choosing.greatest import by_torch
from services.verifier.kernels.triton.choice_kernels import first_of_greatest
from services.verifier.model.slice import ModelSlice
from services.verifier.model.target_port import NOT_CHOSEN, Rows, Sampling
from services.verifier.stages.stage_ranks import StageRanks
from speculation.errors import TargetLost
from speculation.types import SamplingParams
from tests.engine.virtual_ranks import Board, OnBoard
from tests.kernels.kernels_here import needs_kernels
from tests.lossless import test_choice_by_shard as of_ids
from tests.lossless import test_draws_by_shard as of_draws
from tests.lossless.test_triton_ranks import SIZES, parts_of, together
from tests.tiny_models.tiny import make_tiny_model

Chosen = tuple[list[tuple[int, ...]], bool]
PARENTS = (-1, -1, 0, 2)
OTHERS = {
    "drawn": SamplingParams(temperature=0.9, seed=3),
    "truncated": SamplingParams(temperature=0.8, top_k=4, top_p=0.9, seed=4),
    "nucleus": SamplingParams(temperature=0.8, top_p=0.7, seed=5),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of whose tokens each two, 80 ids apart, have equal logits: in one part of two, and in two parts of four."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), **SIZES)
    model = LlamaForCausalLM.from_pretrained(folder)
    weight = model.lm_head.weight.data
    ids = torch.arange(len(weight))
    weight[:] = weight[ids - ids // 80 % 2 * 80]
    model.save_pretrained(folder)
    return folder


def chosen(part: ModelSlice, captured: bool) -> list[Chosen]:
    """The choices after passes over prompts and trees, and whether each pass's were found in parts."""
    if captured:
        # As on a GPU, but launched one by one.
        part._graphs = part._captured(part._config)
    chooser = Chooser()
    for owner, blocks in (("a", [2]), ("b", [0]), *zip(OTHERS, ([1], [3], [4]), strict=True)):
        part.pool.assign(owner, blocks, 1)
        params = OTHERS.get(owner)
        chooser.open(owner, None if params is None else Sampling(params=params, prompt_length=5))

    def rows(name: str, context: int, *tokens: int, parents: tuple[int, ...] = (), k: int = 0) -> Rows:
        return Rows(request_id=name, context=context, tokens=tokens, parents=parents, top_k=k, logits=1 + len(parents))

    def done(*batch: Rows) -> list[tuple[int, ...]]:
        logits = part.run(batch, None, sought=chooser.sought(batch))
        found = None if part.best is None else part.best.found
        made = chooser.outcomes(batch, logits, part.likeliest) if found is None else chooser.outcomes_of_parts(batch, found)
        told.append(([each.choices for each in made], found is not None))
        return told[-1][0]

    told: list[Chosen] = []
    ((first,), _) = done(rows("a", 0, 5, 6, 7, 8), rows("b", 0, 9, 3))
    done(rows("a", 4, first, 1, 2, 3, 4, parents=PARENTS), rows("b", 2, 7))
    done(rows("a", 4, first, k=6), rows("b", 3, 7))
    for at in range(0, 10, 2):
        done(rows("drawn", at, 5, 6, 1, 2, 3, 4, parents=PARENTS), rows("a", 5 + at, 3))
    done(rows("truncated", 0, 5, 6), rows("a", 14, 3))
    done(rows("nucleus", 0, 5, 6), rows("a", 15, 3))
    return told


def of_ranks(model: Path, ranks: int, *, captured: bool) -> list[list[Chosen]]:
    parts = parts_of(model, ranks, find=first_of_greatest)
    return together(parts, lambda part: chosen(part, captured))


@pytest.mark.exhaustive
@pytest.mark.parametrize("captured", [False, True], ids=["launched", "in buckets"])
def test_choices_are_those_of_one_process(model: Path, captured: bool) -> None:
    (whole,) = of_ranks(model, 1, captured=captured)
    wanted = [choices for choices, _ in whole]
    for ranks in (2, 4):
        for found in of_ranks(model, ranks, captured=captured):
            assert [choices for choices, _ in found] == wanted
            # A nucleus depends on whole rows.
            assert [by_part for _, by_part in found] == [True] * 9 + [False]


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["an offset of ids is forgotten", "noise from the first id", "a rank's own rows"])
def test_a_planted_fault_is_seen(model: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = device_parts._drawn
    if fault == "an offset of ids is forgotten":
        monkeypatch.setattr(
            best_of_shards, "over_ranks", lambda find, shards: lambda own: over_ranks(find, shards)(own) % 160
        )
    elif fault == "noise from the first id":
        monkeypatch.setattr(device_parts, "_drawn", lambda own, draws, first: drawn(own, draws, 0))
    else:
        monkeypatch.setattr(best_of_shards, "over_ranks", lambda find, shards: find)
    (whole,) = of_ranks(model, 1, captured=True)
    try:
        found = of_ranks(model, 2, captured=True)[0]
    except TargetLost:
        # What each believes to be the text is computed next.
        return
    assert [choices for choices, _ in found] != [choices for choices, _ in whole]


def of_parts(logits: torch.Tensor, ranks: int, find: Callable[[torch.Tensor], torch.Tensor]) -> list[list[int]]:
    board, length = Board(ranks), logits.shape[1] // ranks

    def of(rank: int) -> list[int]:
        shards = StageRanks(rank, ranks)
        shards.connect(OnBoard(board, rank))
        found: list[int] = over_ranks(find, shards)(logits[:, rank * length : (rank + 1) * length]).tolist()
        return found

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(of, range(ranks)))


@pytest.mark.parametrize(("ranks", "vocabulary"), [(2, 320), (3, 321), (4, 320), (8, 128256)])
def test_the_likeliest_of_parts(ranks: int, vocabulary: int) -> None:
    logits = of_ids.rows_of_ties(vocabulary)
    assert of_parts(logits, ranks, by_torch) == [by_torch(logits).tolist()] * ranks
    for at, number in ((0, math.nan), (vocabulary - 1, math.inf), (vocabulary // 2, -math.nan)):
        logits[at % 7, at] = number
        assert [found[at % 7] for found in of_parts(logits, ranks, by_torch)] == [NOT_CHOSEN] * ranks


@needs_kernels
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("vocabulary", [960, 972])
def test_draws_are_those_of_whole_rows(ranks: int, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_draws, "finder", DevicePartFinder)
    of_draws.test_draws_are_those_of_whole_rows(ranks, vocabulary)


@needs_kernels
@pytest.mark.examples(30)
@pytest.mark.parametrize("seed", range(150))
def test_any_parameters_by_any_ranks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equals the first alone is told for certain: ids that are observed are those of a device."""
    monkeypatch.setattr(of_draws, "finder", DevicePartFinder)
    monkeypatch.setattr(
        of_draws, "pass_of", lambda *given, made=of_draws.pass_of, **named: made(*given, **{**named, "k": 0})
    )
    of_draws.test_any_parameters_by_any_ranks(seed)


@needs_kernels
def test_the_first_of_equals_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def finder(_: Any) -> DevicePartFinder:
        return DevicePartFinder()

    monkeypatch.setattr(of_ids, "PartFinder", finder)
    logits = of_ids.rows_of_ties(320)
    for k in (1, 8):
        wanted = [ids[0] for ids in of_ids.in_whole_rows(logits, k)]
        for found in of_ids.by_parts(logits, k, 2):
            assert found is not None and [ids[0] for ids in found] == wanted
