"""Our pipeline against transformers' processors and against arithmetic by hand."""

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from services.verifier.choosing.processors import build_pipeline
from speculation.types import SamplingParams

torch.manual_seed(0)
ROW = torch.randn(32)
HISTORY = [3, 4, 4, 9, 9, 9]


def process(stop_ids: frozenset[int] = frozenset(), **params: object) -> torch.Tensor:
    pipeline = build_pipeline(SamplingParams(**params), prompt_length=2, stop_ids=stop_ids)  # type: ignore[arg-type]
    assert pipeline is not None
    return pipeline(ROW, HISTORY)


def test_nothing_to_do_is_no_pipeline() -> None:
    assert build_pipeline(SamplingParams(), prompt_length=2, stop_ids=frozenset()) is None
    assert build_pipeline(SamplingParams(temperature=1), prompt_length=2, stop_ids=frozenset()) is None


def test_warpers_in_the_order_of_generate() -> None:
    theirs = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.05),
        ]
    )
    ours = process(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.3)
    assert torch.equal(ours, theirs(torch.tensor([HISTORY]), ROW[None])[0])


def test_greedy_ignores_warpers_but_not_penalties() -> None:
    assert build_pipeline(SamplingParams(top_k=1, top_p=0.1), prompt_length=2, stop_ids=frozenset()) is None
    assert not torch.equal(process(repetition_penalty=2.0), ROW)


def test_presence_and_frequency_count_the_answer_only() -> None:
    changed = process(presence_penalty=0.5, frequency_penalty=0.25) - ROW
    expected = torch.zeros(32)
    expected[4], expected[9] = -(0.5 + 0.25), -(0.5 + 3 * 0.25)
    assert torch.allclose(changed, expected, atol=1e-6)


def test_a_bias_is_added_to_its_tokens_alone() -> None:
    changed = process(logit_bias={5: 10.0, 6: -100.0}) - ROW
    assert changed[5] == 10 and changed[6] == -100 and changed.count_nonzero() == 2


def test_min_tokens_forbids_stop_tokens_until_then() -> None:
    assert process(stop_ids=frozenset({7}), min_tokens=5)[7] == float("-inf")
    assert torch.equal(process(stop_ids=frozenset({7}), min_tokens=4), ROW)
