"""Where ranks share the vocabulary, tokens are drawn from what each finds in its own part: those drawn from whole rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from services.verifier.choosing import best_of_shards as module
from services.verifier.choosing.best_of_shards import FoundInParts, PartFinder, best_of_shards
from services.verifier.choosing.chooser import Chooser
from services.verifier.choosing.sought import Sought
from services.verifier.kernels.native.draw_kernel import DrawKernel, DrawnRow
from services.verifier.kernels.native.library import library
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Outcome, Rows, Sampling
from services.verifier.stages.stage_ranks import StageRanks
from speculation.types import SamplingParams
from tests.engine.choices import random_logits, random_params
from tests.engine.stage_threads import launch_thread
from tests.engine.virtual_ranks import Board, OnBoard
from tests.lossless.test_choice_by_shard import bytes_sent
from tests.lossless.test_ranks_of_other_types import BY_THREE
from tests.lossless.test_tensor_parallel import SIZES, config
from tests.tiny_models.tiny import make_tiny_model

_LIBRARY = library()
pytestmark = [
    pytest.mark.skipif(_LIBRARY is None, reason="no native kernels here"),
    pytest.mark.xdist_group("stages"),
]
PARENTS = (-1, -1, 0, 2, 2, 1)


def finder() -> PartFinder:
    assert _LIBRARY is not None
    return PartFinder(_LIBRARY)


def pass_of(params: Sequence[SamplingParams], guesses: Sequence[int] = (5, 6, 7, 8, 9, 10), k: int = 4) -> list[Rows]:
    """An entry for each, with a tree that holds ``guesses``."""
    return [
        Rows(request_id=str(at), context=7 + at, tokens=(1, *guesses), parents=PARENTS, logits=7, top_k=k)
        for at in range(len(params))
    ]


def chooser_of(params: Sequence[SamplingParams], *, by_law: bool = False) -> Chooser:
    made = Chooser(kernels=None if by_law else _LIBRARY)
    for at, own in enumerate(params):
        made.open(str(at), Sampling(params=own, prompt_length=3), range(8 + at))
    return made


def by_parts(
    logits: torch.Tensor, batch: Sequence[Rows], sought: Sought, ranks: int, order: Sequence[int] | None = None
) -> list[FoundInParts | None]:
    """What each rank finds."""
    board, length = Board(ranks), logits.shape[1] // ranks

    def of(rank: int) -> FoundInParts | None:
        shards = StageRanks(rank, ranks)
        shards.connect(OnBoard(board, rank, order))
        own = logits[:, rank * length : (rank + 1) * length].contiguous()
        return best_of_shards(own, batch, sought, shards, finder())

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(of, range(ranks)))


def outcomes_by_parts(
    logits: torch.Tensor, params: Sequence[SamplingParams], batch: Sequence[Rows], ranks: int
) -> list[Outcome] | None:
    """None: whole rows are needed."""
    chooser = chooser_of(params)
    if not (sought := chooser.sought(batch)).ids or sought.ids > logits.shape[1] // ranks:
        return None
    found = by_parts(logits, batch, sought, ranks)
    assert all(each == found[0] for each in found)
    return None if found[0] is None else chooser.outcomes_of_parts(batch, found[0])


def in_whole_rows(logits: torch.Tensor, params: Sequence[SamplingParams], batch: Sequence[Rows]) -> list[Outcome]:
    """As a single process chooses, which is what the law chooses."""
    made = chooser_of(params).outcomes(batch, logits)
    by_law = chooser_of(params, by_law=True).outcomes(batch, logits)
    assert [each.choices for each in made] == [each.choices for each in by_law]
    return made


def likely(logits: torch.Tensor, params: Sequence[SamplingParams]) -> tuple[int, ...]:
    """Guesses of which the first ones are right, so that walks go down."""
    batch = pass_of(params, k=0)
    first = in_whole_rows(logits, params, batch)[0].choices[0]
    third = in_whole_rows(logits, params, pass_of(params, (first, 6, 7, 8, 9, 10), 0))[0].choices[1]
    return (first, 6, third, 8, 9, 10)


DRAWS = [
    SamplingParams(temperature=1.0, seed=2**64 - 1),
    SamplingParams(temperature=0.7, seed=11),
    SamplingParams(temperature=1.3, top_k=5, seed=12),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, seed=13),
    SamplingParams(temperature=0.6, top_k=1, seed=14),
    SamplingParams(),
]


@pytest.mark.parametrize("vocabulary", [960, 972, 49152])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_draws_are_those_of_whole_rows(ranks: int, vocabulary: int) -> None:
    """A part of 972 / 4 = 243 ids begins within a block of noise."""
    generator, by_part = torch.Generator().manual_seed(ranks), 0
    for turn in range(8):
        params = DRAWS if turn % 2 else DRAWS[turn : turn + 1] or DRAWS
        logits = torch.randn(7 * len(params), vocabulary, generator=generator) * (1, 3)[turn % 2]
        batch = pass_of(params, likely(logits, params))
        found = outcomes_by_parts(logits, params, batch, ranks)
        by_part += found is not None
        if found is not None:
            assert found == in_whole_rows(logits, params, batch)
    # Rounding could decide once in some hundred passes.
    assert by_part >= 7


@pytest.mark.examples(60)
@pytest.mark.parametrize("seed", range(300))
def test_any_parameters_by_any_ranks(seed: int) -> None:
    """Flat, peaked, equal and partly impossible logits; whoever needs whole rows says so."""
    source = random.Random(seed)
    ranks, vocabulary = source.choice([2, 3, 4]), source.choice([480, 960, 1956])
    params = [random_params(source, vocabulary) for _ in range(source.randint(1, 2))]
    logits = torch.cat([random_logits(source, 7, vocabulary) for _ in params])
    batch = pass_of(params, source.sample(range(vocabulary), 6))
    found = outcomes_by_parts(logits, params, batch, ranks)
    whole = chooser_of(params).outcomes(batch, logits)
    assert found is None or found == whole


TIED = [SamplingParams(temperature=0.8, top_k=10, seed=3)]


def test_equals_of_the_last_that_top_k_leaves_need_whole_rows() -> None:
    """transformers keeps all that equal the last one, divided by the temperature."""
    logits = torch.randn(7, 960, generator=torch.Generator().manual_seed(5))
    ranked = logits[0].sort(descending=True).indices
    logits[0, ranked[9:30]] = float(logits[0, ranked[9]])
    assert outcomes_by_parts(logits, TIED, pass_of(TIED), 2) is None
    logits[0, ranked[9:30]] = float(logits[0, ranked[9]]) + torch.arange(21, 0, -1) * 1e-3
    assert outcomes_by_parts(logits, TIED, pass_of(TIED), 2) is not None


def test_equals_in_several_parts_need_whole_rows() -> None:
    """Each part tells more than its equals; together they are more than what is kept of a row."""
    params = [SamplingParams(temperature=1.0, top_k=2, seed=3)]
    logits = torch.randn(7, 960, generator=torch.Generator().manual_seed(6)) * 0.1
    logits[:, 10], logits[:, [100, 600, 700]] = 5.5, 5.0
    assert outcomes_by_parts(logits, params, pass_of(params, k=0), 2) is None
    logits[:, 700] = 4.5
    assert outcomes_by_parts(logits, params, pass_of(params, k=0), 2) == in_whole_rows(logits, params, pass_of(params, k=0))


def test_what_rounding_could_decide_needs_whole_rows() -> None:
    """Two ids of which one leads by less than the noise is known to, and a part of which none may be drawn."""
    params = [SamplingParams(temperature=1.0, seed=9)]
    logits = torch.zeros(7, 960)
    batch, told = pass_of(params), []
    sought = chooser_of(params).sought(batch)
    for at, first in ((0, 0), (1, 480)):
        told.append(finder().draws.best(logits[:, 480 * at : 480 * at + 480].contiguous(), [DrawnRow(0, 8, 9, 1.0)], first))
    (one, id_of_one, _), (other, id_of_other, _) = told
    assert outcomes_by_parts(logits, params, batch, 2) is not None
    # The law's sums are doubles, the logits floats: they can be brought within 1e-6 of each other.
    logits[0, int(id_of_one if one < other else id_of_other)] += abs(one - other)
    assert by_parts(logits, batch, sought, 2) == [None, None]
    logits[0, 480:] = -torch.inf
    assert by_parts(logits, batch, sought, 2) == [None, None]


def _forgets_where_it_begins(patch: pytest.MonkeyPatch) -> None:
    best = DrawKernel.best
    patch.setattr(DrawKernel, "best", lambda self, own, draws, first: best(self, own, draws, 0))


def _forgets_where_ids_begin(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_merged", lambda parts, length, merged=module._merged: merged(parts, 0))


def _takes_ties_by_rank(patch: pytest.MonkeyPatch) -> None:
    """The last rank's first."""

    def merged(parts: Sequence[tuple[list[float], list[float]]], length: int) -> list[tuple[float, int]]:
        return sorted(found(parts, length), key=lambda pair: (pair[0], -(pair[1] // length), pair[1]))

    found = module._merged
    patch.setattr(module, "_merged", merged)


def _takes_a_share_of_k(patch: pytest.MonkeyPatch) -> None:
    """Of two ranks half as many each, and nobody asks whether that is enough."""
    patch.setattr(module, "_says_all", lambda *_: True)
    sought = Chooser.sought
    patch.setattr(
        Chooser, "sought", lambda self, batch: Sought(ids=-(-sought(self, batch).ids // 2), draws=sought(self, batch).draws)
    )


def _asks_for_no_more_than_k(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_says_all", lambda *_: True)


def _noise_of_the_chain(patch: pytest.MonkeyPatch) -> None:
    """All rows of a tree take the noise of its first one."""
    rows = Sought.of_rows
    patch.setattr(Sought, "of_rows", lambda self, batch: ((row, 8, draw) for row, _, draw in rows(self, batch)))


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], SamplingParams, bool]] = {
    "a part forgets which noise it begins with": (_forgets_where_it_begins, DRAWS[0], False),
    "a part's offset of ids is forgotten": (_forgets_where_ids_begin, DRAWS[2], False),
    "ties are resolved by rank, not by id": (_takes_ties_by_rank, DRAWS[0], True),
    "k is shared out among the parts": (_takes_a_share_of_k, DRAWS[3], False),
    "equals of the last one are left out": (_asks_for_no_more_than_k, TIED[0], True),
    "noise of the chain for the whole tree": (_noise_of_the_chain, DRAWS[0], False),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, params, tied = FAULTS[fault]
    generator, unequal = torch.Generator().manual_seed(1), []
    for planted in (False, True):
        if planted:
            plant(monkeypatch)
        unequal.append(0)
        for seed in range(12):
            own = [SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, seed=seed)]
            logits = torch.randn(7, 960, generator=generator)
            batch = pass_of(own, likely(logits, own), 8)
            if tied:
                logits = (logits * 4).round() / 4
            found = outcomes_by_parts(logits, own, batch, 2)
            unequal[-1] += found is not None and found != in_whole_rows(logits, own, batch)
    assert unequal[0] == 0 < unequal[1]


def answer(target: TransformersTarget, name: str, params: SamplingParams) -> tuple[list[Outcome], int]:
    """A prompt, rows alone and trees whose nodes are drawn before; and how many passes were in parts."""
    assert target.open(name, 200, sampling=Sampling(params=params, prompt_length=9))
    made, parts, context, tokens = list[Outcome](), 0, 0, tuple(range(9))
    for turn in range(10):
        tree: tuple[int, ...] = ()
        parents: tuple[int, ...] = ()
        if turn % 2:
            tree, parents = (made[-1].choices[0], 5, 6), (-1, -1, 0)
        batch = [
            Rows(request_id=name, context=context, tokens=(*tokens, *tree), parents=parents, logits=1 + len(tree), top_k=3)
        ]
        target.begin(batch)
        made += target.finish()
        best = target._part.best
        parts += best is not None and best.found is not None
        target.keep(name, context, range(len(tokens)))
        context, tokens = context + len(tokens), (made[-1].choices[0],)
    target.close(name)
    return made, parts


ASKED = [
    *DRAWS,
    SamplingParams(temperature=1.0, top_p=0.8, seed=21),
    SamplingParams(temperature=1.0, min_p=0.1, seed=22),
    SamplingParams(temperature=0.8, top_k=20, repetition_penalty=1.2, seed=23),
    SamplingParams(temperature=0.8, logprobs=2, seed=24),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By how many ranks share them."""
    four = make_tiny_model(tmp_path_factory.mktemp("model"), **SIZES)
    return {2: four, 3: make_tiny_model(tmp_path_factory.mktemp("model"), **BY_THREE), 4: four}


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (3, 1), (4, 1), pytest.param(2, 2, marks=pytest.mark.exhaustive)])
def test_answers_are_those_of_one_process(models: dict[int, Path], ranks: int, stages: int) -> None:
    single = TransformersTarget(config(models[ranks]))
    target = TransformersTarget(config(models[ranks], ranks, stages=stages), launch_thread)
    try:
        for at, params in enumerate(ASKED):
            found, parts = answer(target, str(at), params)
            whole, _ = answer(single, str(at), params)
            for own, other in zip(found, whole, strict=True):
                assert (own.choices, own.top_ids, own.error) == (other.choices, other.top_ids, other.error)
            # A part of 320 / 4 ids, few of them equal.
            assert parts >= 8 if at < len(DRAWS) else parts == 0
    finally:
        target.shutdown()


def test_few_bytes_travel(models: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the layers three numbers of a draw, beside the ids and logits that drafters want."""
    sent = bytes_sent(monkeypatch)
    target = TransformersTarget(config(models[2], 2), launch_thread)
    try:
        sizes = []
        for at, params in enumerate((SamplingParams(), DRAWS[0], DRAWS[2])):
            assert target.open(str(at), 100, sampling=Sampling(params=params, prompt_length=3))
            sent.clear()
            target.begin([Rows(request_id=str(at), context=0, tokens=(1, 2, 3), logits=1, top_k=4)])
            target.finish()
            sizes.append(sum(sent))
        # Both ranks are threads of this process. Top-k of five wants one id more.
        assert [size - sizes[0] for size in sizes[1:]] == [2 * 3 * 8, 2 * (6 - 4) * 2 * 8]
    finally:
        target.shutdown()
