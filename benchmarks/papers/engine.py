"""Outrider's decoding loop on one target, one request at a time, with a drafter of its own for each row of a table."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.bench.records import Request
from benchmarks.papers.labelled_guesses import LabelledGuesses
from cluster.models.drafters import draft_models, noise_trial, stream_weights
from cluster.models.target import ResolvedModel
from cluster.settings.component_configs import drafter_config, verifier_config
from cluster.settings.config import Settings
from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.links.in_process import InProcessDraftLink, InProcessRetrievalLink
from services.retrieval.config import RetrievalConfig
from services.retrieval.service import RetrievalService
from services.verifier.engine.origins import Origin
from services.verifier.service import VerifierService
from speculation.columns import DraftColumns, ReportColumns
from speculation.messages import (
    CloseSession,
    Draft,
    DraftFailure,
    FeatureChunk,
    ForgetTenant,
    GenerationRequest,
    OpenSession,
    Progress,
    StepReport,
)
from speculation.ports import Drafter, DraftsAtOnce, DraftsTogether
from speculation.sources import SOURCES, kind_of
from speculation.types import Plan, SamplingParams

# What an experiment decides itself: drafts and look-ups are waited for, and nothing is kept from request to request.
SETTINGS = (
    "drafter.models_in=drafter",
    "drafter.keep_calibration=false",
    "verifier.keep_learnt=false",
    "drafter.retrieval_deadline_s=1",
    "verifier.max_nodes=128",
    "verifier.enable_prefix_caching=false",
    "verifier.check_every=0",
    "verifier.named_deadline_s=60",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowDrafting:
    """How a row is drafted for.

    Attributes:
        sources: none for plain decoding.
        nodes: most drafted tokens of a pass.
        index: folder of the index that its sources look up in.
    """

    sources: tuple[str, ...] = ()
    nodes: int = 0
    config: DrafterConfig = field(default_factory=DrafterConfig)
    index: Path | None = None


PLAIN = RowDrafting()


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """An answer.

    Attributes:
        arrivals: (seconds since the request began, number of tokens that came then), a pass each.
        drafted_by, accepted_by: drafted tokens that were checked, and those that were accepted, by source, or by label where
            ``SpectraConfig.label_guesses`` is set.
    """

    tokens: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...]
    drafted_by: dict[str, int]
    accepted_by: dict[str, int]

    @property
    def seconds(self) -> float:
        """From the first token to the last."""
        return self.arrivals[-1][0] - self.arrivals[0][0] if self.arrivals else 0.0


class PaperEngine:
    """A loaded target. ``draft`` changes the drafter; ``answer`` decodes.

    Attributes:
        max_model_len: most tokens of prompt and answer together.

    Raises:
        ConfigurationError: the model or a drafter's weights cannot be used.
    """

    def __init__(self, settings: Settings, model: ResolvedModel) -> None:
        self.config = drafter_config(settings, model)
        self.layers = {name: each.layers for name, each in draft_models(settings, model).items()}
        self._number = 0
        self._runner = asyncio.Runner()
        self._drafting = PLAIN
        self._retrieval: RetrievalService | None = None
        self._stop_drafting: Callable[[], Awaitable[None]] | None = None
        self._labels: LabelledGuesses | None = None
        self._drafter = ChangingDrafter(DrafterService(DrafterConfig()))
        origin = Origin(name="the drafter", link=InProcessDraftLink(self._drafter), trusted=True)
        streams, noise = stream_weights(settings, model), noise_trial(settings, model)
        self._verifier = VerifierService(verifier_config(settings, model), [origin], streams=streams, try_noise=noise)
        self._runner.run(self._verifier.start())
        self.max_model_len = self._runner.run(self._verifier.describe()).max_model_len

    def draft(self, drafting: RowDrafting) -> None:
        """Draft with a new drafter, which has learnt nothing yet.

        Raises:
            ConfigurationError: its weights or its index cannot be used.
        """
        self._runner.run(self._change(drafting))

    def answer(self, request: Request, params: SamplingParams, *, plainly: bool = False, adapter: str = "") -> Decoded:
        """Decode a request, with the row's drafts or ``plainly``, by the target or with one of its LoRA adapters."""
        plan = self._plan(PLAIN if plainly else self._drafting)
        return self._runner.run(self._decode(request, params, plan, adapter))

    def close(self) -> None:
        """Release the target and its threads."""
        self._runner.run(self._stop())
        self._runner.close()

    async def _change(self, drafting: RowDrafting) -> None:
        await self._leave()
        if drafting.index is not None:
            self._retrieval = RetrievalService(RetrievalConfig(index=drafting.index))
            await self._retrieval.start()
        trained = drafting.config.trained
        own = {name: folder for name, folder in trained.checkpoints.items() if name in drafting.sources}
        # With these weights alone, they are loaded at the start, not in the first answer.
        config = replace(drafting.config, trained=replace(trained, checkpoints=own))
        drafter = DrafterService(config, None if self._retrieval is None else InProcessRetrievalLink(self._retrieval))
        await drafter.start()
        self._labels = LabelledGuesses(drafter, drafting.sources[0]) if config.spectra.label_guesses else None
        self._drafter.now, self._drafting, self._stop_drafting = self._labels or drafter, drafting, drafter.stop

    async def _leave(self) -> None:
        if self._stop_drafting is not None:
            await self._stop_drafting()
            self._stop_drafting = None
        if self._retrieval is not None:
            await self._retrieval.stop()
            self._retrieval = None

    async def _stop(self) -> None:
        await self._verifier.stop()
        await self._leave()

    def _plan(self, drafting: RowDrafting) -> Plan:
        specs = {name: SOURCES[kind_of(name)] for name in drafting.sources}
        return Plan(
            strategy="+".join(drafting.sources) or "autoregressive",
            sources=drafting.sources,
            max_nodes=drafting.nodes,
            observe_top_k=max((spec.top_k for spec in specs.values()), default=0),
            observe_layers=tuple(
                sorted({layer for name, spec in specs.items() for layer in self.layers.get(name, spec.layers)})
            ),
            observe_prompt=any(spec.prompt_features for spec in specs.values()),
            effort="paper",
        )

    async def _decode(self, request: Request, params: SamplingParams, plan: Plan, adapter: str) -> Decoded:
        self._number += 1
        message = GenerationRequest(
            request_id=f"{request.id} {self._number}", prompt=request.prompt, sampling=params, plan=plan, adapter=adapter
        )
        drafted, taken = self._counts()
        tokens: list[int] = []
        arrivals: list[tuple[float, int]] = []
        start = time.perf_counter()
        async for event in self._verifier.generate(message):
            if isinstance(event, Progress) and event.token_ids:
                tokens += event.token_ids
                arrivals.append((time.perf_counter() - start, len(event.token_ids)))
        drafted_now, taken_now = self._counts()
        return Decoded(
            tokens=tuple(tokens),
            arrivals=tuple(arrivals),
            drafted_by=dict(drafted_now - drafted),
            accepted_by=dict(taken_now - taken),
        )

    def _counts(self) -> tuple[Counter[str], Counter[str]]:
        """Drafted tokens so far, and accepted ones."""
        if self._labels is not None:
            return Counter(self._labels.drafted), Counter(self._labels.accepted)
        stats = self._verifier.loop.stats
        return Counter(stats.nodes_by_source), Counter(stats.accepted_by_source)


def with_trained(config: DrafterConfig, **changed: Any) -> DrafterConfig:
    """A configuration with other fields of ``TrainedConfig``."""
    return replace(config, trained=replace(config.trained, **changed))


def differs_at(tokens: Sequence[int], plain: Sequence[int]) -> int | None:
    """The first place where two answers differ; None: they are equal."""
    if tuple(tokens) == tuple(plain):
        return None
    pairs = enumerate(zip(tokens, plain, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(tokens), len(plain)))


class ChangingDrafter:
    """Implements ``speculation.ports.Drafter`` and ``DraftsAtOnce`` by the drafter in ``now``.

    So one loaded target serves rows whose drafters have different settings.
    """

    def __init__(self, first: Drafter) -> None:
        self.now = first

    async def open(self, message: OpenSession) -> Draft | DraftFailure | None:
        return await self.now.open(message)

    async def step(self, message: StepReport) -> Draft | DraftFailure | None:
        return await self.now.step(message)

    def at_once(self, message: StepReport) -> Draft | DraftFailure | None:
        return self.now.at_once(message) if isinstance(self.now, DraftsAtOnce) else None

    def together(self, reports: ReportColumns) -> DraftColumns | None:
        return self.now.together(reports) if isinstance(self.now, DraftsTogether) else None

    def further(self, session_id: str) -> AsyncIterator[Draft]:
        return self.now.further(session_id)

    def features(self, message: FeatureChunk) -> None:
        self.now.features(message)

    def close(self, message: CloseSession) -> None:
        self.now.close(message)

    async def forget(self, message: ForgetTenant) -> None:
        await self.now.forget(message)
