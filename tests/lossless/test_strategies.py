"""Strategies x links x sampling parameters on a tiny model: always the tokens of plain decoding, and greedily those of
transformers' own ``generate``."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from _pytest.mark import ParameterSet
from transformers import AutoModelForCausalLM

from cluster.models.drafters import by_kernels, linear_kernels, read_stream_weights
from services.drafter.config import DrafterConfig, LookaheadConfig, SpectraConfig, TrainedConfig
from services.drafter.service import DrafterService
from services.links.in_process import InProcessDraftLink
from services.verifier.config import TargetConfig, VerifierConfig
from services.verifier.engine.config import LoopConfig
from services.verifier.kernels.native.library import library
from services.verifier.service import VerifierService
from speculation.sources import SOURCES, STRATEGIES, WHERE_TRAINED, kind_of, source_of
from speculation.types import Plan
from tests.drafters.draft_links import linked
from tests.engine.fakes import PLAIN, RandomDrafter, RandomRetriever, collect, origin, request
from tests.engine.layouts import in_one_process
from tests.lossless.suites import ONE_PROCESS
from tests.tiny_models.draft_models import draft_beside
from tests.tiny_models.mixture import make_mixture
from tests.tiny_models.trained_heads import LAYERS, STREAM_FORMS, heads_beside

# Answers to the second and the third one cross the border of a block, after four tokens and after seven.
PROMPTS = [
    [5, 6, 7, 8, 9, 5, 6, 7],
    [40, 41, 42] * 20,
    [100 + i for i in range(118)] + [100, 101, 102],
    [17],
]
ANSWER = 32
SAMPLING: list[dict[str, object]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_p": 0.9, "seed": 2},
    {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2, "seed": 3},
    {"repetition_penalty": 1.5},
]
# Of two origins: the last one is drafted elsewhere.
TWO = ("spectra_core", "random")
# A second model of one kind.
_SECOND = source_of("draft_model", "second")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model, as it is or in another form."""
    return tiny_model if request.param == "dense" else make_mixture(tiny_model, tmp_path_factory.mktemp("forms") / "model")


@asynccontextmanager
async def verifier(
    folder: Path,
    drafter: str,
    link: str,
    budget: Literal["fixed", "measured"],
    draft_deadline_s: float = 0.025,
    drafting_for: Path | None = None,
    instead: Mapping[str, Path] | None = None,
    dtype: Literal["float32", "int8"] = "float32",
    max_batched_tokens: int = 50,
    max_nodes: int = 64,
    states_stay: bool = False,
) -> AsyncIterator[VerifierService]:
    """A verifier of the model in ``folder``, whose drafter's models are for ``drafting_for``; None: for the same.

    Args:
        instead: by source, other weights than the usual ones.
        dtype: what models that draft compute with.
        states_stay: see ``TargetConfig``.
    """
    heads = heads_beside(drafting_for := drafting_for or folder)
    config = DrafterConfig(
        trained=TrainedConfig(
            checkpoints={
                "draft_model": draft_beside(drafting_for),
                **heads,
                _SECOND: draft_beside(drafting_for, disturbed=0.2),
                **(instead or {}),
            },
            target=drafting_for,
            draft_kernels=partial(by_kernels, dtype=dtype),
            linear_kernels=linear_kernels,
            dtype=dtype,
        ),
        lookahead=LookaheadConfig(ngram=4, window=3, guesses=4),
        spectra=SpectraConfig(ngram=4, window=3, guesses=4),
        draft_ahead=2,
    )
    service = RandomDrafter(vocab=250) if drafter != "real" else DrafterService(config, RandomRetriever(vocab=250))
    verifier_config = VerifierConfig(
        model_name="tiny",
        target=TargetConfig(
            model_path=str(folder),
            kv_cache_tokens=2048,
            max_model_len=512,
            threads=1,
            states_stay=states_stay,
            # It is computed by our kernels alone.
            draft_adapter=heads_beside(folder)["uno"] if library("auto") is not None else None,
        ),
        loop=LoopConfig(max_batched_tokens=max_batched_tokens, draft_deadline_s=draft_deadline_s),
        max_nodes=max_nodes,
        budget=budget,
    )
    streams = read_stream_weights(heads_beside(folder)["streaming"], folder) if "streaming" in heads else None
    async with linked(service, link) as draft_link:
        origins = [origin(draft_link)]
        if drafter == "both":
            near = InProcessDraftLink(DrafterService(config, RandomRetriever(vocab=250)))
            origins = [origin(draft_link, "far", sources=["random"]), origin(near, "near", sources=TWO[:-1])]
        running = VerifierService(verifier_config, origins, streams=streams)
        await running.start()
        try:
            yield running
        finally:
            await running.stop()


async def answers(
    folder: Path,
    drafter: str,
    link: str,
    plan: Plan,
    sampling: dict[str, object],
    *,
    together: bool,
    budget: Literal["fixed", "measured"] = "fixed",
) -> list[list[int]]:
    async with verifier(folder, drafter, link, budget) as running:
        return await said(running, plan, sampling, together=together)


async def said(running: VerifierService, plan: Plan, sampling: dict[str, object], *, together: bool) -> list[list[int]]:
    """A running verifier's answers to the prompts."""
    wanted = [
        request(f"r{i}", prompt, plan, max_tokens=ANSWER, **{"ignore_eos": True, **sampling})
        for i, prompt in enumerate(PROMPTS)
    ]
    answering = [collect(running.loop, one) for one in wanted]
    results = await asyncio.gather(*answering) if together else [await one for one in answering]
    return [tokens for tokens, _, _ in results]


_PLAIN: dict[tuple[Path, str], list[list[int]]] = {}


async def plain_answers(folder: Path, sampling: dict[str, object]) -> list[list[int]]:
    """What plain decoding says to each prompt alone, in one process; computed once for a model and a sampling."""
    key = folder, json.dumps(sampling, sort_keys=True)
    if key not in _PLAIN:
        with in_one_process():
            _PLAIN[key] = await answers(folder, "real", "in_process", PLAIN, sampling, together=False)
    return _PLAIN[key]


def plan_of(sources: tuple[str, ...], strategy: str = "any", **fields: Any) -> Plan:
    """A plan that gives sources the hidden states that they want."""
    layers = sorted({layer for source in map(kind_of, sources) for layer in LAYERS.get(source, SOURCES[source].layers)})
    return Plan(
        strategy=strategy,
        sources=sources,
        max_nodes=20,
        observe_top_k=6,
        observe_layers=tuple(layers),
        observe_prompt=any(SOURCES[kind_of(source)].prompt_features for source in sources),
        **fields,
    )


def _cases() -> list[ParameterSet]:
    """Every strategy on both links in `make test`, greedily and sampled; all combinations in `make test-all`."""
    always = [("dense", "in_process", 0), ("dense", "grpc", 2)]
    forms = (("dense", "in_process"), ("dense", "grpc"), ("experts made of copies", "in_process"))
    batches = [(model, link, at, True) for model, link in forms for at in range(len(SAMPLING))]
    # Every strategy is alone, too, on one link and one kind of model, greedily and sampled. What else varies here
    # reaches the rows of a batch one by one, or not at all.
    alone = [(*forms[0], at, False) for at in (0, 2)]
    return [
        pytest.param(
            model,
            link,
            SAMPLING[at],
            together,
            marks=() if together and (model, link, at) in always else pytest.mark.exhaustive,
            id=f"{model}-{link}-{SAMPLING[at]}{'' if together else '-alone'}",
        )
        for model, link, at, together in [*batches, *alone]
    ]


@pytest.mark.parametrize(("model", "link", "sampling", "together"), _cases(), indirect=["model"])
async def test_every_strategy_on_every_link(
    model: Path, tiny_model: Path, sampling: dict[str, object], link: str, together: bool, target_layout: str
) -> None:
    plain = await plain_answers(model, sampling)
    blend = (*STRATEGIES["blend"], "retrieval", "semantic", "spectra_core")
    # One service answers by all of them, as users' services do.
    async with verifier(model, "real", link, "fixed") as running:
        assert await said(running, PLAIN, sampling, together=True) == plain
        # As a request that lists its sources has them.
        listed = ("lookahead", "retrieval", "prompt_lookup")
        for sources in [*((source,) for source in SOURCES), blend, listed]:
            plan = plan_of(sources, strategy="auto" if sources == blend else "any")
            assert await said(running, plan, sampling, together=together) == plain, sources
        # No rank computes streams.
        for form in STREAM_FORMS if model == tiny_model and target_layout == ONE_PROCESS else ():
            plan = replace(plan_of((*STRATEGIES["blend"], "streaming")), observe_layers=form)
            assert await said(running, plan, sampling, together=together) == plain, form
    garbage = Plan(strategy="random", sources=("random",), max_nodes=8)
    assert await answers(model, "random", link, garbage, sampling, together=together) == plain, "random"


_TRAINED = WHERE_TRAINED["auto"]
_SOME = [_TRAINED, ("fspad", "draft_model", _SECOND)]
# Two couples at a time, so that every two of them meet in one tree.
_GROUPS = [a + b for a, b in itertools.combinations([_TRAINED[at : at + 2] for at in range(0, len(_TRAINED), 2)], 2)]


@pytest.mark.parametrize(
    ("link", "sampling", "chosen"),
    [
        pytest.param("in_process", SAMPLING[2], _SOME[:1], marks=pytest.mark.exhaustive, id="all"),
        pytest.param("in_process", SAMPLING[0], _SOME, marks=pytest.mark.exhaustive, id="in process, greedily"),
        pytest.param("grpc", SAMPLING[2], _SOME, marks=pytest.mark.exhaustive, id="over gRPC, sampled"),
        # Every pair on both links, greedily and sampled; a link carries greedy drafts as it carries others.
        *(
            pytest.param(link, SAMPLING[at], _GROUPS, marks=pytest.mark.exhaustive, id=f"all pairs-{link}-{at}")
            for link, at in (("in_process", 0), ("grpc", 2))
        ),
    ],
)
async def test_several_trained_sources_in_one_tree(
    tiny_model: Path, chosen: Sequence[tuple[str, ...]], sampling: dict[str, object], link: str
) -> None:
    plain = await plain_answers(tiny_model, sampling)
    # A service of its own for each: what one has learnt of a source decides whether the next one asks it. Trees are large: some
    # of the sources draft what seems unlikely.
    for trained in chosen:
        async with verifier(tiny_model, "real", link, "fixed", draft_deadline_s=10, max_batched_tokens=100) as running:
            for names in (trained, trained[::-1]):
                plan = replace(plan_of((*STRATEGIES["blend"], *names), strategy="auto"), max_nodes=40)
                assert await said(running, plan, sampling, together=True) == plain, names
            # What two of them draft counts as one's alone, so not all of many need appear.
            silent = set(trained) - running.loop.stats.nodes_by_source.keys()
            assert len(silent) <= (0 if chosen is _GROUPS else len(trained) - 2), (trained, silent)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sampling", [SAMPLING[0], SAMPLING[2]], ids=["greedily", "sampled"])
async def test_streams_in_the_pass_beside_other_models(tiny_model: Path, sampling: dict[str, object]) -> None:
    plain = await plain_answers(tiny_model, sampling)
    plan = plan_of((*STRATEGIES["blend"], "fspad", "streaming"), strategy="auto")
    for form in STREAM_FORMS:
        async with verifier(tiny_model, "real", "in_process", "fixed", draft_deadline_s=10) as running:
            read = replace(plan, observe_layers=tuple(sorted({-1, *form})))
            assert await said(running, read, sampling, together=True) == plain, form
            assert running.loop.stats.stream_rows and {"fspad", "streaming"} <= running.loop.stats.nodes_by_source.keys()


@pytest.mark.examples(2)
@pytest.mark.parametrize("link", ["in_process", "grpc"])
async def test_the_measured_budget_changes_no_token(tiny_model: Path, link: str) -> None:
    sampling: dict[str, object] = {"temperature": 0.8, "top_p": 0.9, "seed": 3}
    plain = await plain_answers(tiny_model, sampling)
    for drafter, source in (("real", "prompt_lookup"), ("random", "random")):
        plan = Plan(strategy=source, sources=(source,), max_nodes=8)
        async with verifier(tiny_model, drafter, link, "measured") as running:
            for together in (False, True):
                assert await said(running, plan, sampling, together=together) == plain, (drafter, together)


@pytest.mark.examples(8)
@pytest.mark.parametrize("link", ["in_process", "grpc"])
@pytest.mark.parametrize("sampling", SAMPLING[:4], ids=str)
async def test_two_origins_in_one_tree(tiny_model: Path, sampling: dict[str, object], link: str) -> None:
    """Probes of one beside whatever the other drafts."""
    plain = await plain_answers(tiny_model, sampling)
    plan = Plan(strategy="any", sources=TWO, max_nodes=24, observe_top_k=6)
    assert await answers(tiny_model, "both", link, plan, sampling, together=True) == plain


@pytest.mark.examples(2)
@pytest.mark.parametrize("penalty", [1.0, 1.4])
@pytest.mark.parametrize("model", ["dense", "experts made of copies"], indirect=True)
async def test_greedy_equals_transformers_generate(model: Path, penalty: float) -> None:
    plan = Plan(strategy="prompt_lookup", sources=("prompt_lookup",), max_nodes=8)
    ours = await answers(model, "real", "in_process", plan, {"repetition_penalty": penalty}, together=True)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for prompt, tokens in zip(PROMPTS, ours, strict=True):
        theirs = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=ANSWER,
            min_new_tokens=None,
            do_sample=False,
            repetition_penalty=penalty,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert tokens == theirs[0, len(prompt) :].tolist()
