"""The batched chooser against the law, bit for bit: transformers' processors and speculation/choose.py, row by row."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from services.generation_config import ModelProcessors
from services.verifier.choosing import candidates, chooser, penalties, picks
from services.verifier.choosing.chooser import Chooser
from services.verifier.choosing.noise import words
from services.verifier.choosing.penalties import Changes
from services.verifier.choosing.processors import LogitsPipeline, build_pipeline, build_truncation
from services.verifier.native.library import Library, library
from services.verifier.target_port import NOT_CHOSEN, Outcome, Rows, Sampling, TokenRule
from speculation.acceptance import stop_token_ids
from speculation.choose import choose, log_probabilities
from speculation.errors import Internal
from speculation.philox import NoiseStream, gumbel, gumbels, uniforms
from speculation.types import SamplingParams

EOS = frozenset({3})
NONE = ModelProcessors()
MODEL = ModelProcessors(no_repeat_ngram_size=2, typical_p=0.8, eos_token_ids=(3,))


@dataclass(frozen=True)
class Case:
    """A request in mid-answer, and its rows in a pass."""

    params: SamplingParams
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    tree: tuple[int, ...]
    parents: tuple[int, ...]
    logits: torch.Tensor
    model: ModelProcessors = NONE
    rule: TokenRule | None = None

    @property
    def text(self) -> tuple[int, ...]:
        return (*self.prompt, *self.answer)

    def path(self, row: int) -> list[int]:
        """Tokens of the nodes down to a row."""
        node, path = row - 1, []
        while node >= 0:
            path.append(self.tree[node])
            node = self.parents[node]
        return path[::-1]

    def processed(self, row: int) -> torch.Tensor:
        """By the law: the whole history through transformers' processors."""
        stop_ids = stop_token_ids(self.params, EOS)
        pipeline = build_pipeline(self.params, prompt_length=len(self.prompt), stop_ids=stop_ids, model=self.model)
        if pipeline is None and self.rule is None:
            return self.logits[row]
        allowed = None if self.rule is None else self.rule.allowed(self.path(row))
        return (pipeline or LogitsPipeline([], []))(self.logits[row], [*self.text, *self.path(row)], allowed)

    def position(self, row: int) -> int:
        return len(self.text) + len(self.path(row))

    def choice(self, row: int) -> int:
        """The law's; ``NOT_CHOSEN`` where it finds that nothing can be chosen."""
        try:
            return choose(self.processed(row), self.params, self.params.seed, self.position(row))
        except Internal:
            return NOT_CHOSEN

    def reached(self) -> set[int]:
        """Rows that the law's own choices lead to."""
        found, frontier = {0}, [0]
        while frontier:
            row = frontier.pop()
            below = [
                node + 1
                for node, parent in enumerate(self.parents)
                if parent == row - 1 and self.tree[node] == self.choice(row)
            ]
            found.update(below)
            frontier += below
        return found


def outcomes(cases: list[Case], kernels: Library | None = None, **rows: object) -> list[Outcome]:
    """All of them in one pass, though of models with different generation configs only alike ones share a chooser."""
    found: list[Outcome] = []
    for model in dict.fromkeys(case.model for case in cases):
        own = [case for case in cases if case.model == model]
        made = Chooser(EOS, model, kernels)
        for at, case in enumerate(own):
            sampling = Sampling(params=case.params, prompt_length=len(case.prompt), rule=case.rule)
            made.open(str(at), sampling, case.text)
        batch = [
            Rows(
                session_id=str(at),
                context=len(case.text) - 1,
                tokens=(case.text[-1], *case.tree),
                parents=case.parents,
                logits=1 + len(case.tree),
                **rows,  # type: ignore[arg-type]
            )
            for at, case in enumerate(own)
        ]
        found += made.outcomes(batch, torch.cat([case.logits for case in own]))
    return found


def random_logits(source: random.Random, rows: int, vocabulary: int) -> torch.Tensor:
    """Flat, peaked, rounded (so that many are equal), partly impossible."""
    seeded = np.random.default_rng(source.randrange(2**32))
    logits = seeded.normal(0, source.choice([0.1, 1, 3, 10]), (rows, vocabulary))
    if source.random() < 0.3:
        logits = np.round(logits * source.choice([1, 4])) / 2
    if source.random() < 0.5:
        logits[:, seeded.integers(0, vocabulary, 3)] += source.choice([2, 8, 20])
    if source.random() < 0.2:
        logits[seeded.random((rows, vocabulary)) < 0.4] = -np.inf
        logits[:, seeded.integers(0, vocabulary)] = 1.0
    return torch.from_numpy(logits.astype(np.float32))


def random_params(source: random.Random, vocabulary: int) -> SamplingParams:
    def maybe(value: object, otherwise: object) -> object:
        return value if source.random() < 0.4 else otherwise

    biased = {source.randrange(vocabulary): source.uniform(-100, 100) for _ in range(3)}
    return SamplingParams(
        temperature=source.choice([0.0, 0.0, 0.001, 0.3, 0.8, 1.0, 1.0, 1.7, 100.0]),
        top_k=maybe(source.choice([1, 2, 5, 40, vocabulary - 1, vocabulary, 10**6]), 0),  # type: ignore[arg-type]
        top_p=maybe(source.choice([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-9]), 1.0),  # type: ignore[arg-type]
        min_p=maybe(source.choice([1e-35, 0.001, 0.05, 0.5, 1.0]), 0.0),  # type: ignore[arg-type]
        seed=source.randrange(2**64),
        min_tokens=maybe(source.randint(1, 6), 0),  # type: ignore[arg-type]
        max_tokens=64,
        stop_token_ids=(source.randrange(vocabulary),),
        ignore_eos=source.random() < 0.3,
        repetition_penalty=maybe(source.choice([0.5, 1.1, 1.3, 3.0]), 1.0),  # type: ignore[arg-type]
        presence_penalty=maybe(source.uniform(-2, 2), 0.0),  # type: ignore[arg-type]
        frequency_penalty=maybe(source.uniform(-2, 2), 0.0),  # type: ignore[arg-type]
        logit_bias=maybe(biased, {}),  # type: ignore[arg-type]
    )


def random_case(source: random.Random, vocabulary: int, model: ModelProcessors = NONE) -> Case:
    """A tree through which the walk goes some way: its first nodes hold what the law chooses."""
    nodes = source.choice([0, 1, 4, 9])
    some = min(vocabulary, source.choice([4, 50]))
    case = Case(
        params=random_params(source, vocabulary),
        prompt=tuple(source.randrange(some) for _ in range(source.randint(1, 12))),
        answer=tuple(source.randrange(some) for _ in range(source.choice([0, 1, 7]))),
        tree=tuple(source.randrange(some) for _ in range(nodes)),
        parents=tuple(source.randint(-1, node - 1) for node in range(nodes)),
        logits=random_logits(source, 1 + nodes, vocabulary),
        model=model,
    )
    for node, parent in enumerate(case.parents):
        if source.random() < 0.6:
            tree = list(case.tree)
            tree[node] = case.choice(parent + 1)
            case = replace(case, tree=tuple(max(0, token) for token in tree))
    return case


def cases(seed: int, count: int) -> Iterator[list[Case]]:
    source = random.Random(seed)
    for _ in range(count):
        vocabulary = source.choice([4, 37, 128, 1000, 6400])
        alike = [random_case(source, vocabulary) for _ in range(source.choice([1, 2, 5, 16]))]
        own = [random_case(source, vocabulary, MODEL) for _ in range(source.choice([0, 0, 2]))]
        yield alike + own


def check(seed: int, count: int, kernels: Library | None = None) -> int:
    """Every choice is the law's, and there is one wherever the walk comes; gives how many there were."""
    compared = 0
    for batch in cases(seed, count):
        for case, outcome in zip(batch, outcomes(batch, kernels), strict=True):
            reached = case.reached()
            expected = [case.choice(row) if row in reached else NOT_CHOSEN for row in range(len(case.logits))]
            assert list(outcome.choices) == expected, case.params
            assert (outcome.error is None) == all(expected[row] != NOT_CHOSEN for row in reached)
            for row in reached:
                compared += expected[row] != NOT_CHOSEN
    return compared


def check_all(seeds: range, kernels: Library | None = None) -> None:
    """``check``, and that it compared something."""
    for seed in seeds:
        assert check(seed, 12, kernels) > 50


@pytest.fixture(params=("numpy", "avx512", "avx2", "neon"))
def kernels(request: pytest.FixtureRequest) -> Library | None:
    """No compiled kernels, or those of an instruction set."""
    found = None if request.param == "numpy" else library(request.param)
    if found is None and request.param != "numpy":
        pytest.skip(f"{request.param} cannot be compiled or run here")
    return found


@pytest.mark.parametrize("seed", range(8))
def test_every_choice_is_the_laws(seed: int, kernels: Library | None) -> None:
    check_all(range(seed, seed + 1), kernels)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the logits lay on a device: all rows at once, and only what can be chosen comes to the host."""
    for module in (candidates, chooser, penalties, picks):
        monkeypatch.setattr(module, "on_host", lambda logits: False)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("seed", range(4))
def test_every_choice_is_the_laws_on_a_device(seed: int) -> None:
    check_all(range(100 + seed, 101 + seed))


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

    def apply(self, logits: torch.Tensor) -> None:
        pass


WRONG = {
    "another temperature": (chooser, "sample", lambda logits, cells: picks.sample(logits * 1.02, cells)),
    "another position": (picks, "gumbels", lambda seeds, stream, positions, ids: gumbels(seeds, stream, positions + 1, ids)),
    "the last of equals": (
        chooser,
        "argmax",
        lambda logits, cells: (len(row) - 1 - int(row.flip(0).argmax()) for row in logits),
    ),
    "no penalties": (chooser, "Changes", NoChanges),
    "a wider nucleus": (picks, "narrow", lambda logits, params: candidates.narrow(logits, [wider(own) for own in params])),
}


def wider(params: SamplingParams) -> SamplingParams:
    return replace(params, top_p=min(1.0, params.top_p + 0.05), min_p=params.min_p / 2)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_chooser_is_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, replacement = WRONG[wrong]
    monkeypatch.setattr(module, name, replacement)
    with pytest.raises(AssertionError):
        check_all(range(8))


def test_the_kept_tokens_are_those_of_transformers() -> None:
    """The very set that top-k, top-p and min-p leave, wherever the chooser does not ask transformers itself."""
    source, decided, asked = random.Random(3), 0, 0
    for _ in range(400):
        vocabulary = source.choice([64, 1000, 6400])
        params = [
            replace(random_params(source, vocabulary), temperature=1.0, top_p=source.choice([0.3, 0.9, 0.99]))
            for _ in range(3)
        ]
        logits = random_logits(source, 3, vocabulary)
        for row, own, found in zip(logits, params, candidates.narrow(logits, params), strict=True):
            truncation = build_truncation(own)
            assert truncation is not None
            kept = truncation(row, ())
            if found is None:
                asked += 1
                continue
            decided += 1
            assert np.array_equal(found.ids, np.flatnonzero(kept.numpy() > -np.inf)), own
            assert np.array_equal(found.weights, kept.numpy()[found.ids].astype(np.float64))
    assert decided > asked


def test_what_rounding_decides_is_left_to_transformers() -> None:
    """Equal logits on both sides of a limit; a nucleus that ends on its limit exactly, or as good as."""
    quarters = torch.full((1, 4), math.log(0.25))
    halves = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]]))
    assert candidates.narrow(quarters, [SamplingParams(temperature=1.0, top_p=0.6)]) == [None]
    assert candidates.narrow(halves, [SamplingParams(temperature=1.0, min_p=0.5)]) == [None]
    for top_p in (0.5, 0.75, 0.75 + 1e-7, 0.75 - 1e-7):
        params = SamplingParams(temperature=1.0, top_p=top_p)
        found = candidates.narrow(halves, [params])[0]
        truncation = build_truncation(params)
        assert found is not None and truncation is not None
        assert np.array_equal(found.ids, np.flatnonzero(truncation(halves[0], ()).numpy() > -np.inf))


def test_sums_are_only_as_exact_as_they_are_said_to_be() -> None:
    """Flat distributions, whose nucleus ends among tokens of all but no probability."""
    seeded = np.random.default_rng(11)
    sorted_after_all = []
    by_sorting = candidates._nucleus_by_sorting

    def counted(*given: Any) -> Any:
        sorted_after_all.append(given)
        return by_sorting(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "_nucleus_by_sorting", counted)
        for spread in (0.1, 1.0, 2.0, 3.0):
            logits = torch.from_numpy(seeded.normal(0, spread, (6, 49152)).astype(np.float32))
            for top_p in (0.2, 0.9, 0.999):
                params = SamplingParams(temperature=1.0, top_p=top_p)
                truncation = build_truncation(params)
                assert truncation is not None
                for row, found in zip(logits, candidates.narrow(logits, [params] * 6), strict=True):
                    if found is not None:
                        assert np.array_equal(found.ids, np.flatnonzero(truncation(row, ()).numpy() > -np.inf))
    assert 0 < len(sorted_after_all) < 72


def test_many_requests_noise_is_each_ones_own() -> None:
    ids = np.array([0, 5, 49151, 7, 2**33])
    seeds, positions = [0, 3, 2**64 - 1, 3, 12], [0, 9, 2**35, 10, 4]
    made = gumbels(np.array(seeds, dtype=np.uint64), NoiseStream.CHOICE, np.array(positions), ids)
    alone = [
        gumbel(seed, NoiseStream.CHOICE, position, np.array([token]))[0]
        for seed, position, token in zip(seeds, positions, ids, strict=True)
    ]
    assert made.tolist() == alone


def test_a_devices_words_are_the_generators() -> None:
    seeds, positions, size = [0, 2**64 - 1, 2**63 + 12345], [0, 2**33 + 5, 17], 1001
    made = words(seeds, NoiseStream.CHOICE, positions, size, torch.device("cpu"))
    for row, seed, position in zip(made.numpy(), seeds, positions, strict=True):
        expected = uniforms(seed, NoiseStream.CHOICE, position, np.arange(size))
        assert np.array_equal((row.astype(np.float64) + 0.5) / 2.0**32, expected)


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
        for case, outcome in zip(batch, outcomes(batch, distributions=True), strict=True):
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
            rows = Rows(session_id="a", context=start, tokens=prompt[start:end], logits=0)
            assert made.outcomes([rows], torch.empty(0, 50))[0].choices == ()
            made.commit("a", start, rows.tokens)
        text = list(prompt)
        for step in range(12):
            nodes = (source.randrange(9), source.randrange(9))
            logits = random_logits(source, 3, 50)
            case = Case(params, prompt, tuple(text[20:]), nodes, (-1, 0), logits, model)
            rows = Rows(session_id="a", context=len(text) - 1, tokens=(text[-1], *nodes), parents=(-1, 0), logits=3)
            outcome = made.outcomes([rows], logits)[0]
            assert outcome.choices[0] == case.choice(0), step
            accepted = nodes[: source.randrange(3)]
            made.commit("a", rows.context, [text[-1], *accepted])
            text += [*accepted, source.randrange(9)]
