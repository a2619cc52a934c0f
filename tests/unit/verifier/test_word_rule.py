"""Allowed tokens and bad words: what may be chosen after any answer and path, by a slow and obvious reading of the rule."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from services.links.in_process import InProcessDraftLink
from services.verifier.choosing.word_rule import word_rule
from services.verifier.model.target_port import PackedBits
from speculation.choose import choose
from speculation.errors import InvalidArgument
from speculation.types import SamplingParams
from tests.engine.fakes import EOS, PLAIN, RandomDrafter, ToyTarget, collect, decoding, request, toy_logits
from tests.running.refusals import refuses

VOCAB = 16
ENDS = frozenset({EOS})


def may(params: SamplingParams, answer: Sequence[int], token: int, ends: frozenset[int] = ENDS) -> bool:
    if params.allowed_token_ids and token not in params.allowed_token_ids:
        return False
    if token in ends and len(answer) < params.min_tokens:
        return False
    text = (*answer, token)
    return not any(text[len(text) - len(word) :] == word for word in params.bad_words if len(word) <= len(text))


def unpacked(bits: PackedBits) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())


@pytest.mark.parametrize("seed", range(20))
def test_it_allows_what_the_rule_says_after_any_path(seed: int) -> None:
    source = random.Random(seed)
    words = tuple(tuple(source.randrange(1, 4) for _ in range(source.randint(1, 4))) for _ in range(source.randint(1, 6)))
    params = SamplingParams(
        bad_words=tuple(word for word in words if word != (3,)),
        allowed_token_ids=(*source.sample(range(VOCAB), 10), 5, 6) if seed % 2 else (),
        min_tokens=source.choice([0, 5]),
    )
    rule = word_rule(params, VOCAB, ENDS)
    if rule is None:
        assert not params.bad_words
        return
    answer: list[int] = []
    for _ in range(40):
        for _ in range(3):
            path = [source.randrange(1, 5) for _ in range(source.randrange(5))]
            found = rule.allowed(path)
            assert found is not None
            assert unpacked(found) == {token for token in range(VOCAB) if may(params, [*answer, *path], token)}
        step = [source.randrange(1, 5) for _ in range(source.randint(1, 3))]
        rule.commit(step)
        answer += step


class _Below:
    def __init__(self, *allowed: int) -> None:
        self.bits = np.packbits(np.isin(np.arange(32), allowed), bitorder="little")

    def allowed(self, path: Sequence[int]) -> PackedBits | None:
        return None if 9 in path else self.bits


def test_it_narrows_what_another_rule_allows() -> None:
    rule = word_rule(SamplingParams(allowed_token_ids=(1, 2), bad_words=((1, 2),)), VOCAB, ENDS, _Below(2, 3))
    assert rule is not None
    found = rule.allowed([])
    assert found is not None and unpacked(found) == {2}
    assert rule.allowed([9]) is None
    with refuses(
        InvalidArgument,
        field="bad_words",
        value="what was given",
        allowed="such that an answer can be given: after 1 tokens of the answer nothing is left",
    ):
        rule.allowed([1])


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(allowed_token_ids=(5,), bad_words=((5,),)), "bad_words"),
        (SamplingParams(allowed_token_ids=(EOS,), min_tokens=2), "allowed_token_ids"),
        (SamplingParams(bad_words=tuple((token,) for token in range(VOCAB))), "bad_words"),
    ],
)
def test_what_leaves_nothing_is_refused(params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        word_rule(params, VOCAB, ENDS)
    assert caught.value.field == field


def plainly(prompt: list[int], params: SamplingParams) -> list[int]:
    """Decoded one by one by the law alone."""
    answer: list[int] = []
    ends = frozenset() if params.ignore_eos else ENDS
    while len(answer) < params.max_tokens:
        logits = toy_logits([*prompt, *answer])
        for token in range(VOCAB):
            if not may(params, answer, token, ends):
                logits[token] = -torch.inf
        logits = logits / (params.temperature or 1)
        answer.append(choose(logits, params, params.seed, len(prompt) + len(answer)))
        if answer[-1] in ends:
            break
    return answer


RULES = [
    {"allowed_token_ids": (1, 2, 3, 5, 8)},
    {"bad_words": ((3,), (5, 6), (1, 2, 1), (4, 4))},
    {"allowed_token_ids": (1, 2, 3, EOS), "bad_words": ((1, 1), (2, 3)), "min_tokens": 4},
]


@pytest.mark.examples(3)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES, ids=["allowed", "bad words", "both"])
async def test_no_drafter_changes_a_token(rule: dict[str, object], temperature: float) -> None:
    asked = {"max_tokens": 40, "temperature": temperature, "seed": 9, **rule}
    expected = plainly([1, 2, 3], SamplingParams(**asked))  # type: ignore[arg-type]
    unruled = plainly([1, 2, 3], SamplingParams(**{**asked, "allowed_token_ids": (), "bad_words": ()}))  # type: ignore[arg-type]
    assert expected != unruled, "the rule must matter for this test to mean anything"
    for mood in ("good", "random", "stale"):
        async with decoding(ToyTarget(), InProcessDraftLink(RandomDrafter(mood=mood))) as loop:
            assert (await collect(loop, request("r", [1, 2, 3], **asked)))[0] == expected
    async with decoding(ToyTarget()) as loop:
        assert (await collect(loop, request("r", [1, 2, 3], PLAIN, **asked)))[0] == expected


async def test_an_answer_that_cannot_go_on_ends_in_one_error_and_others_go_on() -> None:
    async with decoding(ToyTarget()) as loop:
        stuck = request("stuck", [1, 2, 3], PLAIN, allowed_token_ids=(5,), bad_words=((5, 5),), max_tokens=9)
        with refuses(
            InvalidArgument,
            field="bad_words",
            value="what was given",
            allowed="after 1 tokens of the answer nothing is left to choose",
        ):
            await collect(loop, stuck)
        wrong = request("wrong", [1, 2, 3], PLAIN, bad_words=((5, 99),))
        with refuses(InvalidArgument, field="bad_words", value=99, allowed="token ids below 16"):
            await collect(loop, wrong)
        assert len((await collect(loop, request("r", [1], PLAIN, max_tokens=5, ignore_eos=True)))[0]) == 5
