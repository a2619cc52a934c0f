"""What a target makes of requests that go through a pass as columns is what it makes of their rows one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from services.verifier.choosing.chooser import Chooser
from services.verifier.config import TargetConfig
from services.verifier.kv_cache.pool import BLOCK
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import NOT_CHOSEN, Outcome, Prefix, Rows, Sampling, SingleOutcomes, SingleRows
from speculation.types import SamplingParams
from tests.engine.choices import ELSEWHERE

STEPS = 12
# The second and the third choose by what they have said before, the third of three tokens in turn.
PARAMS = (
    SamplingParams(),
    SamplingParams(repetition_penalty=1.5, presence_penalty=1.0),
    SamplingParams(frequency_penalty=2.0, logit_bias={10: 50.0, 11: 50.0, 12: 50.0}),
)


class Decoded(NamedTuple):
    """The tokens of each request with its prompt, and how many of them the next one finds in the cache."""

    tokens: list[list[int]]
    found: list[int]
    of_neighbours: list[int]


@pytest.fixture(scope="module")
def target(tiny_model: Path) -> TransformersTarget:
    return TransformersTarget(TargetConfig(model_path=str(tiny_model), kv_cache_tokens=2048, max_model_len=512))


def decoded(target: TransformersTarget, *, columns: bool) -> Decoded:
    """Decode some prompts at once, each across the end of a block."""
    target.forget("t")
    source = random.Random(3)
    names = [f"r{at}" for at in range(len(PARAMS))]
    texts = [[source.randrange(target.vocab_size) for _ in range(BLOCK - 4)] for _ in names]
    length = len(texts[0])
    for name, text, params in zip(names, texts, PARAMS, strict=True):
        sampling = Sampling(params=params, prompt_length=length)
        assert target.open(name, 2 * BLOCK, Prefix(tokens=tuple(text), tenant="t"), sampling=sampling)
    target.begin(
        [Rows(request_id=name, context=0, tokens=tuple(text), logits=1) for name, text in zip(names, texts, strict=True)]
    )
    for name, text, outcome in zip(names, texts, target.finish(), strict=True):
        target.keep(name, 0, range(length))
        text.append(outcome.choices[0])
    for step in range(STEPS):
        batch = SingleRows(names, [length + step] * len(names), [text[-1] for text in texts])
        target.begin(batch if columns else [*batch])
        outcomes = target.finish()
        if columns:
            target.keep_singles(batch)
        else:
            for name in names:
                target.keep(name, length + step, [0])
        for text, outcome in zip(texts, outcomes, strict=True):
            text.append(outcome.choices[0])
    for name in names:
        target.close(name)
    others = [*texts[1:], texts[0]]
    mixed = [[*text[:length], *other[length:]] for text, other in zip(texts, others, strict=True)]
    return Decoded(texts, [found_of(target, text) for text in texts], [found_of(target, text) for text in mixed])


def found_of(target: TransformersTarget, tokens: Sequence[int]) -> int:
    """How many tokens of a prompt are in the cache. What is computed from them is what is computed without."""
    last = []
    for tenant in ("t", None):
        assert target.open("next", 2 * BLOCK, Prefix(tokens=tuple(tokens), tenant=tenant))
        known = target.computed("next")
        (logits,) = target.forward([Rows(request_id="next", context=known, tokens=tuple(tokens[known:]), logits=1)])
        last.append((known, logits))
        target.close("next")
    assert torch.equal(last[0][1], last[1][1])
    return last[0][0]


def test_columns_leave_in_the_cache_what_rows_leave(target: TransformersTarget) -> None:
    by_columns, by_rows = decoded(target, columns=True), decoded(target, columns=False)
    assert by_columns == by_rows
    assert by_columns.found == [BLOCK] * len(PARAMS)
    assert by_columns.of_neighbours == [0] * len(PARAMS)


@pytest.mark.parametrize("chosen", [True, False], ids=["all", "one is left to the law"])
def test_what_a_device_found_goes_to_the_request_whose_row_it_is(chosen: bool) -> None:
    chooser, logits = Chooser(reader=ELSEWHERE), torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
    batch = SingleRows([f"r{at}" for at in range(4)], [3, 4, 5, 6], [7] * 4)
    for name in batch.request_ids:
        chooser.open(name, None)
    best = logits.argmax(1).tolist()
    assert len(set(best)) == 4
    told = best if chosen else [*best[:2], NOT_CHOSEN, best[3]]
    outcomes = chooser.outcomes(batch, logits, lambda: told)
    assert isinstance(outcomes, SingleOutcomes) == chosen
    assert [*outcomes] == [Outcome(choices=(token,)) for token in best]
    assert [*outcomes] == [*chooser.outcomes([*batch], logits, lambda: told)]
