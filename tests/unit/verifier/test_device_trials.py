"""The rejection rule where the logits are: what is found there is what the rule says of the row's distribution."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from services.verifier.choosing import chooser, device_choice, device_trials
from services.verifier.choosing.chooser import Chooser
from services.verifier.choosing.reading import READER, LogitsReader
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.verify import verify
from services.verifier.model.target_port import NOT_CHOSEN, Outcome, PackedBits, Rows, Sampling
from speculation import rejection
from speculation.acceptance import StopRule
from speculation.errors import Internal
from speculation.rejection import DraftTrial, SeededRandomness
from speculation.tree import children
from speculation.types import Proposal, SamplingParams, TokenTree, Verdict
from tests.engine.choices import ELSEWHERE, EOS, Case, random_logits, random_params

ENDLESS = StopRule(stop_token_ids=frozenset(), generated=0, room=10**6)


def a_proposal(source: random.Random, token: int, logits: torch.Tensor) -> Proposal:
    """A draft distribution near the target's, far from it, or on one token."""
    likely = logits.topk(min(6, len(logits))).indices.tolist()
    ids = tuple({token, *source.choice([likely, likely[:1], source.sample(range(len(logits)), 3)])})
    weights = [source.choice([0.01, 1.0, 5.0]) * source.random() + 1e-6 for _ in ids]
    return Proposal(token_ids=ids, probabilities=tuple(weight / sum(weights) for weight in weights))


def a_case(source: random.Random, vocabulary: int, sampled: bool) -> tuple[Case, TokenTree]:
    """A request in mid-answer with a tree in which siblings may hold the same token."""
    nodes = source.choice([0, 1, 3, 8])
    parents = tuple(source.choice([-1, max(-1, node - 2), node - 1]) for node in range(nodes))
    logits = random_logits(source, 1 + nodes, vocabulary)
    tokens = []
    for parent in parents:
        likely = logits[parent + 1].topk(min(3, vocabulary)).indices.tolist()
        tokens.append(source.choice([*likely, source.randrange(vocabulary)]))
    proposals = [a_proposal(source, token, logits[parent + 1]) for token, parent in zip(tokens, parents, strict=True)]
    tree = TokenTree(
        tokens=tuple(tokens), parents=parents, sources=("s",) * nodes, proposals=tuple(proposals) if sampled else (),
        probes=(nodes - 1,) if not sampled and nodes > 3 else (),
    )  # fmt: skip
    case = Case(
        params=replace(random_params(source, vocabulary), logprobs=source.choice([None, 2])),
        prompt=(1, 2, 3), answer=tuple(source.randrange(vocabulary) for _ in range(4)),
        tree=tree.tokens, parents=parents, logits=logits,
    )  # fmt: skip
    return case, tree


def passed(batch: Sequence[tuple[Case, TokenTree]], reader: LogitsReader = ELSEWHERE) -> Sequence[Outcome]:
    """All of one vocabulary in one pass."""
    made, rows = Chooser(EOS, reader=reader), []
    for at, (case, tree) in enumerate(batch):
        made.open(str(at), Sampling(params=case.params, prompt_length=len(case.prompt), rule=case.rule), case.text)
        rows.append(
            Rows(
                request_id=str(at), context=len(case.text) - 1, tokens=(case.text[-1], *tree.tokens), parents=tree.parents,
                logits=1 + len(tree), tried=tree,
            )
        )  # fmt: skip
    return made.outcomes(rows, torch.cat([case.logits for case, _ in batch]))


def by_law(case: Case, tree: TokenTree, outcome: Outcome) -> Iterator[tuple[int, DraftTrial]]:
    """Rows with a distribution, and their trials by the rule alone."""
    assert outcome.distribution is not None
    for node in range(-1, len(tree)):
        try:
            p = outcome.distribution(node + 1)
        except Internal:
            continue
        randomness, siblings = SeededRandomness(case.params.seed), children(tree).get(node, [])
        yield node + 1, DraftTrial(tree, siblings, partial(np.copy, p), randomness, case.position(node + 1))


def compare(seed: int, count: int, vocabularies: Sequence[int] = (4, 37, 128, 1000)) -> tuple[int, int]:
    """How many coins and draws were compared with the rule's, and how many were left to it."""
    source, compared, left = random.Random(seed), 0, 0
    for _ in range(count):
        vocabulary = source.choice(vocabularies)
        batch = [a_case(source, vocabulary, sampled) for sampled in (True, False, True)]
        for (case, tree), outcome in zip(batch, passed(batch), strict=True):
            for row, trial in by_law(case, tree, outcome):
                coins, drawn = outcome.tried[row]
                assert len(coins) == len(children(tree).get(row - 1, []))
                for ordinal, coin in enumerate(coins):
                    assert coin is None or coin == trial.accepts(ordinal), (case.params, row, ordinal)
                if drawn != NOT_CHOSEN:
                    # The rule would not draw from a sum of nothing but rounding.
                    assert drawn == trial.draw(), (case.params, row)
                compared += 1 + len(coins)
                left += coins.count(None) + (drawn == NOT_CHOSEN)
    return compared, left


@pytest.mark.examples(2)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_found_is_what_the_rule_says(seed: int) -> None:
    compared, left = compare(seed, 25)
    # Among them rows of equal logits, and children that hold all of p.
    assert compared > 200 and left < compared / 2


def test_hardly_anything_is_left_to_the_rule() -> None:
    """Of rows like a model's."""
    seeded, source, count, left = np.random.default_rng(2), random.Random(2), 0, 0
    for _ in range(10):
        case, tree = a_case(source, 2048, True)
        logits = torch.from_numpy(seeded.normal(0, 2.5, (1 + len(tree), 2048)).astype(np.float32))
        params = SamplingParams(temperature=0.9, top_k=source.choice([0, 50]), top_p=0.9, seed=source.randrange(2**64))
        (outcome,) = passed([(replace(case, params=params, logits=logits), tree)])
        count += sum(1 + len(coins) for coins, _ in outcome.tried)
        left += sum(coins.count(None) + (drawn == NOT_CHOSEN) for coins, drawn in outcome.tried)
    assert count > 30 and left <= count / 20


def verified(case: Case, tree: TokenTree, outcome: Outcome) -> tuple[Verdict, int]:
    """What the engine makes of an outcome, and how many distributions it asks for."""
    asked: list[int] = []
    distribution = outcome.distribution
    assert distribution is not None

    def counted(row: int) -> rejection.Distribution:
        asked.append(row)
        return distribution(row)

    request = SimpleNamespace(message=SimpleNamespace(sampling=case.params), tokens=case.text, stop_rule=ENDLESS)
    return verify(cast(LiveRequest, request), tree, replace(outcome, distribution=counted)), len(asked)


def test_the_same_tokens_are_accepted_and_drawn() -> None:
    source, asked, needed = random.Random(8), 0, 0
    for _ in range(40):
        case, tree = a_case(source, 37, source.random() < 0.7)
        (outcome,) = passed([(case, tree)])
        try:
            expected, count = verified(case, tree, replace(outcome, tried=()))
        except Internal:
            continue
        found, fewer = verified(case, tree, outcome)
        assert found == expected
        asked, needed = asked + count, needed + fewer
    assert asked > 30 and needed < asked / 2


def test_on_the_host_nothing_is_computed_that_the_walk_may_not_need() -> None:
    (outcome,) = passed([a_case(random.Random(1), 128, True)], READER)
    assert outcome.tried == () and outcome.distribution is not None


class Demanding:
    """Implements ``TokenRule``: fails at one request's first row."""

    def allowed(self, path: Sequence[int]) -> PackedBits | None:
        raise Internal("no token is allowed")


def test_one_requests_failure_is_its_own() -> None:
    source = random.Random(5)
    fine, broken = a_case(source, 128, True), a_case(source, 128, True)
    first, second = passed([fine, (replace(broken[0], rule=Demanding()), broken[1])])
    assert len(first.tried) == 1 + len(fine[1]) and second.tried == () and second.distribution is not None
    with pytest.raises(Internal, match="no token is allowed"):
        second.distribution(0)


class Elsewhere(torch.Tensor):
    """Counts the numbers that are taken to the host; what is computed from it is elsewhere, too."""

    taken = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("cpu", "numpy", "tolist", "item", "__bool__", "__float__", "__int__"):
            Elsewhere.taken += args[0].numel()
        return super().__torch_function__(func, types, args, kwargs or {})


def test_some_numbers_of_a_row_come_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    source, tried_on = random.Random(4), device_trials.tried_on
    # What rows are copied into has a type of its own.
    monkeypatch.setattr(chooser, "tried_on", lambda prepared, *rest: tried_on(prepared.as_subclass(Elsewhere), *rest))
    batch = []
    for _ in range(6):
        case, tree = a_case(source, 6400, True)
        params = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=3)
        batch.append((replace(case, params=params, logits=case.logits.as_subclass(Elsewhere)), tree))
    most = max(len(siblings) for _, tree in batch for siblings in [*children(tree).values(), []])
    rows = sum(1 + len(tree) for _, tree in batch)
    Elsewhere.taken = 0
    passed(batch)
    assert 0 < Elsewhere.taken <= rows * (1 + 2 * most)


def test_one_kernel_draws_from_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from services.verifier.kernels.triton.choice_kernels import noisy_winners

    monkeypatch.setattr(device_trials, "winners_on", lambda device: noisy_winners)
    compared, left = compare(11, 2, (37, 1000))
    assert compared > 10 and left < compared / 2


def _unclamped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "clamp_", lambda self, min: self.abs_())


def _without_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    made = device_trials._target
    wider = SamplingParams(temperature=1.0)
    monkeypatch.setattr(device_trials, "_target", lambda logits, params, *rest: made(logits, [wider for _ in params], *rest))


def _another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def winners(device: torch.device) -> Any:
        return lambda *given: device_choice.winners_by_torch(*given[:4], device_choice.NoiseStream.CHOICE)

    monkeypatch.setattr(device_trials, "winners_on", winners)


def _raw_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    fans_of = device_trials.fans_of
    monkeypatch.setattr(chooser, "fans_of", lambda tree: fans_of(replace(tree, proposals=())))


def _next_coin(monkeypatch: pytest.MonkeyPatch) -> None:
    uniforms = device_trials.uniforms
    monkeypatch.setattr(device_trials, "uniforms", lambda *given: uniforms(*given[:3], given[3] + 1))


@pytest.mark.parametrize("fault", [_unclamped, _without_reach, _another_stream, _raw_proposals, _next_coin])
def test_a_wrong_trial_is_caught(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        compare(100, 100)
