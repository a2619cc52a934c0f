"""The batched chooser against the law, bit for bit: transformers' processors and speculation/choose.py, row by row."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from typing_extensions import override

from services.model_files.generation_config import ModelProcessors
from services.verifier.choosing import candidates, picks, point_choices, prepared_rows
from services.verifier.choosing.chooser import Chooser
from services.verifier.choosing.penalties import Changes
from services.verifier.choosing.reading import READER, LogitsReader
from services.verifier.kernels.native.library import Library
from services.verifier.model.target_port import NOT_CHOSEN, Rows, Sampling
from speculation.choose import log_probabilities
from speculation.philox import gumbels
from speculation.types import EMPTY_TREE, SamplingParams
from tests.engine.choices import ELSEWHERE, EOS, MODEL, Case, check_all, outcomes, random_case, random_logits, wider
from tests.kernels.kernels_here import SETS, kernels_of


@pytest.fixture(params=("numpy", *SETS))
def kernels(request: pytest.FixtureRequest) -> Library | None:
    """No compiled kernels, or those of an instruction set."""
    return None if request.param == "numpy" else kernels_of(request.param)


@pytest.mark.examples(4)
@pytest.mark.parametrize("seed", range(8))
def test_every_choice_is_the_laws(seed: int, kernels: Library | None) -> None:
    check_all(range(seed, seed + 1), kernels)


@pytest.mark.parametrize("seed", range(4))
def test_every_choice_is_the_laws_on_a_device(seed: int) -> None:
    check_all(range(100 + seed, 101 + seed), reader=ELSEWHERE)


def test_a_large_vocabulary(kernels: Library | None) -> None:
    source = random.Random(1)
    for _ in range(6):
        batch = [random_case(source, 49152) for _ in range(4)]
        for case, outcome in zip(batch, outcomes(batch, kernels), strict=True):
            assert [choice for choice in outcome.choices if choice != NOT_CHOSEN] == [
                case.choice(row) for row in sorted(case.reached())
            ]


class NoChanges(Changes):
    """Penalties that are worked out, and left at that."""

    @override
    def apply(self, logits: torch.Tensor, reader: LogitsReader = READER) -> None:
        pass


WRONG = {
    "another temperature": (
        point_choices,
        "sample",
        lambda logits, cells, reader: picks.sample(logits * 1.02, cells, reader),
    ),
    "another position": (picks, "gumbels", lambda seeds, stream, positions, ids: gumbels(seeds, stream, positions + 1, ids)),
    "the last of equals": (
        point_choices,
        "argmax",
        lambda logits, cells, reader: (len(row) - 1 - int(row.flip(0).argmax()) for row in logits),
    ),
    "no penalties": (prepared_rows, "Changes", NoChanges),
    "a wider nucleus": (picks, "narrow", lambda logits, params: candidates.narrow(logits, [wider(own) for own in params])),
}


@pytest.mark.examples(5)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_chooser_is_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, replacement = WRONG[wrong]
    monkeypatch.setattr(module, name, replacement)
    with pytest.raises(AssertionError):
        check_all(range(8))


@pytest.mark.parametrize("model", [ModelProcessors(), MODEL])
@pytest.mark.parametrize(
    ("bad", "temperature"), [(math.nan, 0.0), (math.nan, 0.8), (-math.inf, 0.0), (-math.inf, 0.8), (math.inf, 0.0)]
)
def test_unusable_logits_fail_their_own_request(
    bad: float, temperature: float, model: ModelProcessors, kernels: Library | None
) -> None:
    source = random.Random(2)
    fine = [random_case(source, 128, model) for _ in range(3)]
    params = SamplingParams(temperature=temperature, top_p=0.9)
    broken = Case(params, (1,), (), (5,), (-1,), torch.full((2, 128), bad), model)
    found = outcomes([fine[0], broken, *fine[1:]], kernels)
    assert found[1].error is not None and "no usable logits" in str(found[1].error)
    assert found[1].choices == (NOT_CHOSEN, NOT_CHOSEN)
    for case, outcome in zip(fine, [found[0], *found[2:]], strict=True):
        assert outcome.error is None and outcome.choices[0] == case.choice(0)


def test_one_requests_processors_failing_is_not_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(4)
    batch = [
        replace(random_case(source, 128), params=SamplingParams(temperature=0.5, seed=at, top_p=0.9)) for at in range(3)
    ]

    def failing(logits: torch.Tensor, params: list[SamplingParams]) -> list[candidates.Candidates | None]:
        if any(own.seed == 1 for own in params):
            raise RuntimeError("planted failure")
        return candidates.narrow(logits, params)

    monkeypatch.setattr(picks, "narrow", failing)
    found = outcomes(batch)
    assert str(found[1].error) == "planted failure"
    assert [found[at].choices[0] for at in (0, 2)] == [batch[at].choice(0) for at in (0, 2)]


def test_what_else_is_asked_for() -> None:
    source = random.Random(6)
    batch = [replace(random_case(source, 1000), params=SamplingParams(logprobs=at)) for at in (0, 4)]
    for case, outcome in zip(batch, outcomes(batch, top_k=3), strict=True):
        assert outcome.top_ids == tuple(tuple(row) for row in case.logits.topk(3).indices.tolist())
        assert outcome.logprobs is not None and outcome.distribution is None
        assert outcome.logprobs(0, 7) == log_probabilities(case.logits[0], 7, case.params.logprobs or 0)


def test_distributions_are_the_processed_ones() -> None:
    source = random.Random(7)
    for _ in range(10):
        batch = [random_case(source, 128, model) for model in (ModelProcessors(), MODEL)]
        for case, outcome in zip(batch, outcomes(batch, tried=EMPTY_TREE), strict=True):
            assert set(outcome.choices) == {NOT_CHOSEN} and outcome.distribution is not None
            for row in range(len(case.logits)):
                if case.params.temperature == 0:
                    expected = np.eye(128)[case.choice(row)]
                else:
                    expected = torch.softmax(case.processed(row).double(), -1).numpy()
                assert np.array_equal(outcome.distribution(row), expected)


def test_counts_follow_what_is_kept(kernels: Library | None) -> None:
    """Chunks of a prompt, then steps that keep a path of the tree: what is counted is what a history would say."""
    source = random.Random(8)
    for model in (ModelProcessors(), MODEL):
        params = SamplingParams(temperature=0.7, repetition_penalty=1.4, frequency_penalty=0.9, presence_penalty=0.4, seed=5)
        prompt = tuple(source.randrange(9) for _ in range(20))
        made = Chooser(EOS, model, kernels)
        made.open("a", Sampling(params=params, prompt_length=20), prompt[:5])
        for start, end in ((5, 9), (9, 19)):
            rows = Rows(request_id="a", context=start, tokens=prompt[start:end], logits=0)
            assert made.outcomes([rows], torch.empty(0, 50))[0].choices == ()
            made.commit("a", start, rows.tokens)
        text = list(prompt)
        for step in range(12):
            nodes = (source.randrange(9), source.randrange(9))
            logits = random_logits(source, 3, 50)
            case = Case(params, prompt, tuple(text[20:]), nodes, (-1, 0), logits, model)
            rows = Rows(request_id="a", context=len(text) - 1, tokens=(text[-1], *nodes), parents=(-1, 0), logits=3)
            outcome = made.outcomes([rows], logits)[0]
            assert outcome.choices[0] == case.choice(0), step
            accepted = nodes[: source.randrange(3)]
            made.commit("a", rows.context, [text[-1], *accepted])
            text += [*accepted, source.randrange(9)]


GREEDY = Sampling(params=SamplingParams(temperature=0.0), prompt_length=3)


@pytest.mark.parametrize("seed", range(20))
def test_plain_requests_take_the_ids_that_the_pass_has_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short way of a batch without trees gives what the long way does, also where a row's choice fails."""
    source = random.Random(seed)
    found: list[list[tuple[tuple[int, ...], type]]] = []
    for _ in range(10):
        size, fails = source.randrange(1, 6), source.random() < 0.3
        logits = torch.from_numpy(
            np.random.default_rng(source.randrange(1 << 30)).normal(size=(size, 40)).astype(np.float32)
        )
        ids = logits.argmax(dim=1).tolist()
        if fails:
            logits[source.randrange(size)] = math.nan
            ids = [NOT_CHOSEN if row.isnan().any() else each for row, each in zip(logits, ids, strict=True)]
        chosen_by = Chooser(EOS, reader=ELSEWHERE)
        batch = [Rows(request_id=f"{at}", context=5, tokens=(source.randrange(40),), logits=1) for at in range(size)]
        for rows in batch:
            chosen_by.open(rows.request_id, None if source.random() < 0.5 else GREEDY)
        for short in (True, False):
            with monkeypatch.context() as patch:
                if not short:
                    patch.setattr(Chooser, "_plain_outcomes", lambda *given: None)
                made = chosen_by.outcomes(batch, logits, partial(list, ids))
            found.append([(each.choices, type(each.error)) for each in made])
        assert found[-1] == found[-2]
        assert (NOT_CHOSEN in [each.choices[0] for each in made]) == fails


def test_likely_ids_may_be_handed_in(kernels: Library | None) -> None:
    """As a device that has found them already, or a target without logits."""
    sent: list[int] = []

    def send(batch: Sequence[Rows], logits: torch.Tensor) -> Callable[[], list[tuple[tuple[int, ...], ...]]]:
        sent.append(len(batch))
        return lambda: [((7, 8),), ()]

    chooser = Chooser(EOS, kernels=kernels, send_likely=send)
    batch = [Rows(request_id=name, context=0, tokens=(1,), logits=1, top_k=k) for name, k in (("a", 2), ("b", 0))]
    for rows in batch:
        chooser.open(rows.request_id, None)
    made = chooser.outcomes(batch, torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]]))
    assert [(each.choices, each.top_ids) for each in made] == [((1,), ((7, 8),)), ((0,), ())]
    assert sent == [2]
