"""Requests in mid-answer, what the law chooses for them, and whether the batched chooser does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from services.model_files.generation_config import ModelProcessors
from services.verifier.choosing.chooser import Chooser
from services.verifier.choosing.processors import LogitsPipeline, build_pipeline
from services.verifier.choosing.reading import READER, LogitsReader
from services.verifier.kernels.native.library import Library
from services.verifier.model.target_port import NOT_CHOSEN, Outcome, Rows, Sampling, TokenRule
from speculation.acceptance import stop_token_ids
from speculation.choose import choose
from speculation.errors import Internal
from speculation.types import SamplingParams

EOS = frozenset({3})
NONE = ModelProcessors()
# As if the logits lay on a device: all rows at once, and only what can be chosen comes to the host.
ELSEWHERE = LogitsReader(on_host=lambda logits: False)
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


def outcomes(
    cases: list[Case], kernels: Library | None = None, reader: LogitsReader = READER, **rows: object
) -> list[Outcome]:
    """All of them in one pass, though of models with different generation configs only alike ones share a chooser."""
    found: list[Outcome] = []
    for model in dict.fromkeys(case.model for case in cases):
        own = [case for case in cases if case.model == model]
        made = Chooser(EOS, model, kernels, reader)
        for at, case in enumerate(own):
            sampling = Sampling(params=case.params, prompt_length=len(case.prompt), rule=case.rule)
            made.open(str(at), sampling, case.text)
        batch = [
            Rows(
                request_id=str(at),
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


def check(seed: int, count: int, kernels: Library | None = None, reader: LogitsReader = READER) -> int:
    """Every choice is the law's, and there is one wherever the walk comes; gives how many there were."""
    compared = 0
    for batch in cases(seed, count):
        for case, outcome in zip(batch, outcomes(batch, kernels, reader), strict=True):
            reached = case.reached()
            expected = [case.choice(row) if row in reached else NOT_CHOSEN for row in range(len(case.logits))]
            assert list(outcome.choices) == expected, case.params
            assert (outcome.error is None) == all(expected[row] != NOT_CHOSEN for row in reached)
            for row in reached:
                compared += expected[row] != NOT_CHOSEN
    return compared


def check_all(seeds: range, kernels: Library | None = None, reader: LogitsReader = READER) -> None:
    """``check``, and that it compared something."""
    for seed in seeds:
        assert check(seed, 12, kernels, reader) > 50


def wider(params: SamplingParams) -> SamplingParams:
    """Parameters that leave a little more."""
    return replace(params, top_p=min(1.0, params.top_p + 0.05), min_p=params.min_p / 2)
