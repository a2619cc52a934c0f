"""Where ranks share the vocabulary, the likeliest ids are found by each in its own part: the same as in whole rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM
from typing_extensions import override

from services.verifier.choosing import best_of_shards as module
from services.verifier.choosing.best_of_shards import LikeliestIds, PartFinder, best_of_shards
from services.verifier.choosing.sought import Sought
from services.verifier.kernels.native.library import library
from services.verifier.kernels.native.likeliest_kernel import LikeliestKernel
from services.verifier.model.slice import ModelSlice
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Outcome, Rows, Sampling
from services.verifier.stages.exchange import Exchange
from services.verifier.stages.stage_ranks import StageRanks
from speculation.types import SamplingParams, TokenTree
from tests.engine.stage_threads import launch_thread
from tests.engine.virtual_ranks import Board, OnBoard, ranks_of, together
from tests.lossless.test_ranks_of_other_types import BY_THREE, TYPES, made
from tests.lossless.test_tensor_parallel import SIZES, config
from tests.tiny_models.tiny import make_tiny_model

_LIBRARY = library()
pytestmark = [
    pytest.mark.skipif(_LIBRARY is None, reason="no native kernels here"),
    pytest.mark.xdist_group("stages"),
]


def rows_of_ties(vocabulary: int, rows: int = 40) -> torch.Tensor:
    """Few different numbers, both zeros among them, so that the greatest of a row has equals in several parts."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(rows, vocabulary, generator=generator)
    logits[: rows // 2] = logits[: rows // 2].round()
    logits[0] = 1.0
    logits[1] = -logits[1].abs()
    logits[1, 7], logits[1, vocabulary - 2] = -0.0, 0.0
    logits[2, 3::5] = -math.inf
    return logits


def in_whole_rows(logits: torch.Tensor, k: int) -> LikeliestIds:
    """As a single process finds them."""
    assert _LIBRARY is not None
    found = LikeliestKernel(_LIBRARY).find(logits, range(len(logits)), k)
    assert found is not None and [ids[0] for ids in found] == logits.numpy().argmax(1).tolist()
    return found


class _Faulty(OnBoard):
    """Gathers ``k`` ids of each row, of parts of ``length`` ids, with a fault of choices planted."""

    fault, length, k = "", 0, 1

    @override
    def gather(self, own: torch.Tensor, within_s: float | None = None) -> torch.Tensor:
        gathered = super().gather(own, within_s)
        ranks = len(gathered)
        made = gathered.view(ranks, -1, 2, self.k)
        if self.fault == "an offset of ids is forgotten":
            made[1:, :, 1] -= self.length * torch.arange(1, ranks)[:, None, None]
        elif self.fault == "a tie falls to the wrong part":
            # What is told are doubles: a hair more changes the order of equals alone.
            made[1:, :, 0] = made[1:, :, 0].nextafter(torch.tensor(math.inf, dtype=torch.float64))
        return gathered


def by_parts(
    logits: torch.Tensor, k: int, ranks: int, fault: str = "", order: Sequence[int] | None = None
) -> list[LikeliestIds | None]:
    """What each rank finds."""
    board, length = Board(ranks), logits.shape[1] // ranks

    def of(rank: int) -> LikeliestIds | None:
        shards, gathers = StageRanks(rank, ranks), _Faulty(board, rank, order)
        gathers.fault, gathers.length, gathers.k = fault, length, k
        shards.connect(gathers)
        assert _LIBRARY is not None
        own = logits[:, rank * length : (rank + 1) * length].contiguous()
        found = best_of_shards(own, (), Sought(ids=k), shards, PartFinder(_LIBRARY))
        return None if found is None else found.ids

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(of, range(ranks)))


@pytest.mark.parametrize(("ranks", "vocabulary"), [(2, 320), (3, 321), (4, 320), (4, 49152)])
@pytest.mark.parametrize("k", [1, 8])
def test_the_likeliest_are_those_of_whole_rows(ranks: int, vocabulary: int, k: int) -> None:
    logits = rows_of_ties(vocabulary)
    assert by_parts(logits, k, ranks) == [in_whole_rows(logits, k)] * ranks
    assert by_parts(logits[:0], k, ranks) == [[]] * ranks


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize(
    ("fault", "order"),
    [("shards swapped", [1, 0]), ("an offset of ids is forgotten", None), ("a tie falls to the wrong part", None)],
)
def test_a_planted_fault_is_seen(fault: str, order: Sequence[int] | None, k: int) -> None:
    logits = rows_of_ties(320)
    wanted = in_whole_rows(logits, k)
    assert not any(found == wanted for found in by_parts(logits, k, 2, fault, order))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.nan])
def test_what_is_no_number_needs_whole_rows(value: float) -> None:
    for at in (0, 200, 319):
        logits = rows_of_ties(320)
        logits[5, at] = value
        assert by_parts(logits, 1, 2) == by_parts(logits, 8, 2) == [None, None]


def test_parts_of_which_little_may_be_chosen_need_whole_rows() -> None:
    logits = rows_of_ties(320)
    logits[5, 160 + 7 :] = -math.inf
    assert by_parts(logits, 7, 2) == [in_whole_rows(logits, 7)] * 2
    assert by_parts(logits, 8, 2) == [None, None]
    logits[5, 160:] = -math.inf
    assert by_parts(logits, 1, 2) == [None, None]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By how many ranks share them: models whose tokens have 40 different logits, so that every choice is one of equals."""
    found = {}
    for ranks, sizes in ((3, BY_THREE), (4, SIZES)):
        folder = found[ranks] = make_tiny_model(tmp_path_factory.mktemp("model"), **sizes)
        model = LlamaForCausalLM.from_pretrained(folder)
        weight = model.lm_head.weight.data
        weight[:] = weight[torch.arange(len(weight)) % 40]
        model.save_pretrained(folder)
    return {1: found[4], 2: found[4], **found}


def outcomes(target: TransformersTarget) -> Iterator[tuple[Sequence[Outcome], bool]]:
    """Of passes over prompts, chunks and trees that want ids and that want none; and whether they were found in parts."""
    drawn = Sampling(params=SamplingParams(temperature=0.9, seed=3), prompt_length=9)
    assert target.open("a", 100) and target.open("b", 100) and target.open("c", 60, sampling=drawn)

    def rows(
        name: str, context: int, tokens: Sequence[int], parents: Sequence[int] = (), k: int = 0, logits: int = 1
    ) -> Rows:
        return Rows(request_id=name, context=context, tokens=tuple(tokens), parents=tuple(parents), top_k=k, logits=logits)

    def done(*batch: Rows) -> tuple[Sequence[Outcome], bool]:
        target.begin(batch)
        found = target.finish()
        for each in batch:
            target.keep(each.request_id, each.context, range(each.chain))
        best = target._part.best
        return found, best is not None and best.found is not None

    yield done(rows("a", 0, range(5, 25), logits=0))
    first, parts = done(rows("a", 20, range(9)), rows("b", 0, range(90, 60, -1), k=8))
    yield first, parts
    # The first node is the target's own choice, the second is not.
    after = first[0].choices[0]
    yield done(rows("a", 29, (7, after, after + 1, 3), (-1, -1, 0), k=8, logits=4), rows("b", 30, (8,), k=1))
    yield done(rows("a", 30, (after,)), rows("b", 31, (9,)), rows("c", 0, range(9), k=8))
    yield done(rows("b", 32, (6,), k=64))


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (3, 1), (4, 1), pytest.param(2, 2, marks=pytest.mark.exhaustive)])
def test_outcomes_are_those_of_one_process(models: dict[int, Path], ranks: int, stages: int) -> None:
    whole = [found for found, _ in outcomes(TransformersTarget(config(models[ranks])))]
    target = TransformersTarget(config(models[ranks], ranks, stages=stages), launch_thread)
    try:
        found, by_part = zip(*outcomes(target), strict=True)
        assert list(found) == whole
        assert list(by_part) == [True] * 5
    finally:
        target.shutdown()


def test_what_parts_do_not_say_is_chosen_from_whole_rows(models: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "best_of_shards", lambda *_: None)
    whole = [found for found, _ in outcomes(TransformersTarget(config(models[1])))]
    target = TransformersTarget(config(models[2], 2), launch_thread)
    try:
        found, by_part = zip(*outcomes(target), strict=True)
        assert list(found) == whole and not any(by_part)
    finally:
        target.shutdown()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.5, "top_p": 0.9},
        {"temperature": 0.5, "min_p": 0.1},
        {"temperature": 0.5, "top_k": 64},
        {"logprobs": 0},
        {"repetition_penalty": 1.1},
        {"logit_bias": {5: 1.0}},
    ],
    ids=str,
)
def test_what_needs_whole_rows_gets_them(models: dict[int, Path], params: dict[str, object]) -> None:
    chooser = TransformersTarget(config(models[1]))._chooser
    plain = Rows(request_id="plain", context=0, tokens=(1, 2), logits=1, top_k=3)
    chooser.open("plain", None)
    chooser.open("other", Sampling(params=SamplingParams(**params), prompt_length=1))  # type: ignore[arg-type]
    assert chooser.sought([plain]) == Sought(ids=3)
    other = Rows(request_id="other", context=0, tokens=(1, 2), logits=1)
    assert chooser.sought([plain, other]) == Sought()
    for more in ({"scored": (2,)}, {"tried": TokenTree()}, {"noise": (1,)}):
        own = Rows(request_id="plain", context=0, tokens=(1, 2), logits=1, **more)  # type: ignore[arg-type]
        assert chooser.sought([plain, own]) == Sought()


@pytest.mark.examples(12)
@pytest.mark.parametrize("model_type", TYPES)
def test_the_likeliest_of_every_type(model_type: str, tmp_path: Path) -> None:
    """Some change logits behind their output layer, one by one."""
    folder = made(model_type, tmp_path)
    batch = [Rows(request_id="a", context=0, tokens=tuple(range(5, 45)), parents=tuple(range(-1, 38)), logits=40)]

    def run(part: ModelSlice) -> torch.Tensor:
        part.pool.assign("a", [0], 1)
        return part.run(batch, None, sought=Sought(ids=8))

    wanted = in_whole_rows(run(ModelSlice(config(folder), 0)), 8)
    parts = ranks_of(config(folder, 2))
    together(parts, run)
    found = [part.best.found for part in parts if part.best is not None]
    assert [each.ids for each in found if each is not None] == [wanted, wanted]


def bytes_sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each shard that a rank sends from now on."""
    sent: list[int] = []
    send = Exchange.send_shard

    def counted(self: Exchange, tensor: torch.Tensor, rank: int) -> object:
        sent.append(tensor.nbytes)
        return send(self, tensor, rank)

    monkeypatch.setattr(Exchange, "send_shard", counted)
    return sent


def test_few_bytes_travel(models: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the layers 8 ids and logits of a row, in place of its part of the vocabulary."""
    sent = bytes_sent(monkeypatch)
    target = TransformersTarget(config(models[2], 2), launch_thread)
    try:
        assert target.open("a", 100)
        rows = Rows(request_id="a", context=0, tokens=(1, 2, 3), logits=1, top_k=8)
        sizes = []
        for run in (lambda: (target.begin([rows]), target.finish()), lambda: target.forward([rows])):
            sent.clear()
            run()
            sizes.append(sum(sent))
        # Both ranks are threads of this process.
        assert sizes[1] - sizes[0] == 2 * (160 * 4 - 8 * 2 * 8)
    finally:
        target.shutdown()
