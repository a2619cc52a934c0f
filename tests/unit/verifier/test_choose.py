"""The target's choice: exact where it can be enumerated, chi-square where it is drawn."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from services.verifier.choosing.candidates import likeliest
from services.verifier.choosing.processors import build_pipeline
from speculation.choose import choose, log_probabilities, ranked
from speculation.errors import Internal
from speculation.types import SamplingParams

LOGITS = torch.tensor([1.2, -0.3, 0.4, 2.0])


def draw(params: SamplingParams, draws: int, logits: torch.Tensor = LOGITS) -> np.ndarray:
    pipeline = build_pipeline(params, prompt_length=1, stop_ids=frozenset())
    row = logits if pipeline is None else pipeline(logits, [0])
    return np.bincount([choose(row, params, seed, 17) for seed in range(draws)], minlength=len(logits))


def expected(params: SamplingParams) -> np.ndarray:
    """The processed distribution, worked out by hand: sort, cut, renormalise."""
    p = torch.softmax(LOGITS.double() / params.temperature, -1).numpy()
    order = np.argsort(-p)
    kept = set(order[: params.top_k] if params.top_k else order)
    if params.top_p < 1:
        within, total = set(), 0.0
        for token in [token for token in order if token in kept]:
            within.add(token)
            total += p[token] / sum(p[list(kept)])
            if total >= params.top_p:
                break
        kept = within
    kept = {token for token in kept if p[token] >= params.min_p * p.max()}
    cut = np.array([p[token] if token in kept else 0.0 for token in range(len(p))])
    return cut / cut.sum()


GRID = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.5, top_k=2),
    SamplingParams(temperature=1.0, min_p=0.3),
    SamplingParams(temperature=1.3, top_k=3, top_p=0.8),
]


@pytest.mark.examples(6)
@pytest.mark.parametrize("params", GRID)
def test_frequencies_match_the_processed_distribution(params: SamplingParams) -> None:
    counts, p = draw(params, 20_000), expected(params)
    assert counts[p == 0].sum() == 0
    possible = p > 0
    assert stats.chisquare(counts[possible], p[possible] * counts.sum()).pvalue > 1e-3


def test_the_same_test_notices_a_wrong_temperature() -> None:
    counts, p = draw(SamplingParams(temperature=1.1), 20_000), expected(SamplingParams(temperature=1.0))
    assert stats.chisquare(counts, p * counts.sum()).pvalue < 1e-6


def test_temperature_zero_is_the_argmax() -> None:
    for order in itertools.permutations(range(4)):
        row = torch.tensor([float(value) for value in order])
        assert choose(row, SamplingParams(), 0, 0) == order.index(3)


def test_seed_and_position_decide_nothing_else_does() -> None:
    params = SamplingParams(temperature=1)
    first = [choose(LOGITS, params, 3, position) for position in range(200)]
    assert first == [choose(LOGITS.clone(), params, 3, position) for position in range(200)]
    assert first != [choose(LOGITS, params, 4, position) for position in range(200)]
    assert len(set(first)) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[math.nan] * 4, [-math.inf] * 4, [0.0, 1.0, math.nan, 2.0]])
def test_unusable_logits_are_an_error(temperature: float, bad: list[float]) -> None:
    with pytest.raises(Internal, match="no usable logits"):
        choose(torch.tensor(bad), SamplingParams(temperature=temperature), 0, 0)


def test_log_probabilities_are_of_the_logits_as_they_are() -> None:
    entry = log_probabilities(LOGITS, 2, 3)
    reference = torch.log_softmax(LOGITS, -1)
    assert entry.logprob == pytest.approx(float(reference[2]))
    assert entry.top_ids == (3, 0, 2)
    assert entry.top_logprobs == tuple(float(reference[token]) for token in entry.top_ids)


def test_of_equal_ones_the_least_id_is_first() -> None:
    """As tokens are chosen, so that the first of them is the greedy token in bfloat16, too, where many are equal."""
    logprobs = torch.log_softmax(torch.randn(5, 4000, generator=torch.Generator().manual_seed(0)).bfloat16().float(), -1)
    logprobs[0, 7], logprobs[1, 9] = -torch.inf, 0.0
    values, ids = ranked(logprobs, 300)
    order = np.lexsort((np.broadcast_to(np.arange(4000), (5, 4000)), -logprobs.numpy()), axis=-1)[:, :300]
    assert np.array_equal(ids.numpy(), order)
    assert torch.equal(values, logprobs.gather(1, ids))
    assert (values[:, 1:] == values[:, :-1]).any()
    assert ranked(logprobs, 0)[1].shape == (5, 0)


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 49152), (7, 6400), (3, 1000), (2, 128), (5, 512)])
def test_the_likeliest_are_found_without_sorting_the_vocabulary(rows: int, vocabulary: int) -> None:
    torch.manual_seed(rows)
    for k in (1, 2, 8):
        logits = torch.randn(rows, vocabulary)
        assert torch.equal(likeliest(logits, k), logits.topk(k).indices)
        # The greatest side by side.
        logits = logits.sort(descending=True).values
        assert torch.equal(likeliest(logits, k), torch.arange(k).expand(rows, k))
