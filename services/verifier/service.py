"""The verifier service: a target and the decoding loop that runs on it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from services.logs.names import log_name
from services.metrics.registry import DROPPED, Metrics
from services.model_files.folder import weights_digest
from services.model_files.weights.files import WeightFiles
from services.verifier.changing.adapting import Adapting
from services.verifier.changing.reloading import Reloading
from services.verifier.checks.kept_measurements import Kept
from services.verifier.checks.noise_guesses import TryNoise, guess_behind_noise
from services.verifier.checks.pass_costs import costs_of, machine_and_model
from services.verifier.checks.self_check import SelfCheck
from services.verifier.comparing.comparing import Comparing
from services.verifier.config import TargetConfig, VerifierConfig
from services.verifier.engine.deciding.contest import Contest
from services.verifier.engine.identity import Identity, with_adapter
from services.verifier.engine.loop import DecodingLoop
from services.verifier.engine.native.node_choice import measured_budget
from services.verifier.engine.origins import Origin
from services.verifier.engine.registered_models import RegisteredModels
from services.verifier.engine.stats import LoopStats
from services.verifier.grammar.compiled_grammars import CompiledGrammars
from services.verifier.kernels.gpu_choice import DEFINITION
from services.verifier.model.stream_rows import StreamWeights
from services.verifier.model.target import TransformersTarget
from services.verifier.stages.upstream import Launch
from speculation.adapters import AdapterOrder
from speculation.budget import Budget, FixedBudget
from speculation.errors import ConfigurationError, Unavailable
from speculation.messages import DecodingCounts, Finished, GenerationRequest, Progress, ReplayedAnswer, VerifierCard
from speculation.reloads import ReloadOrder
from speculation.types import Plan

log = logging.getLogger(__name__)

# Of what is kept of the contest between drafting and plain decoding.
_CONTEST_FORMAT = 1


class VerifierService:
    """Implements ``speculation.ports.VerifierPort``.

    Args:
        origins: where drafts come from.
        launch: starts the processes of the target's further pipeline stages; needed only if there are any.
        metrics: where its numbers go.
        streams: streams that the target's passes may hold.
        try_noise: tries the adapter of rows of noise in passes of the target, and refuses a useless one.

    Raises:
        ConfigurationError: the model, or that adapter, cannot be served; says why.
        TargetLost: a pipeline stage died while it was loading.
    """

    def __init__(
        self,
        config: VerifierConfig,
        origins: Sequence[Origin],
        launch: Launch | None = None,
        metrics: Metrics = DROPPED,
        streams: StreamWeights | None = None,
        try_noise: TryNoise | None = None,
    ) -> None:
        self._config = config
        self._origins = origins
        # This one thread runs all of torch's parallel work, loading included: each further thread would get an OpenMP team
        # of its own, and two teams on the same cores cost a third of the speed (docs/log.md, 2026-11-21).
        worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="target")
        loading = worker.submit(TransformersTarget, config.target, launch, streams)
        weights = _named_weights(config.target)
        self._target = loading.result()
        try:
            self._target.note_digest(weights)
            if try_noise is not None:
                worker.submit(try_noise, partial(guess_behind_noise, self._target)).result()
            budget = worker.submit(_budget, self._target, config).result()
            self._learnt = worker.submit(_kept_contest, self._target, config).result()
        except BaseException:
            self._target.shutdown()
            raise
        target = self._target
        self._weights = target.weights
        drafts_itself = config.target.draft_adapter is not None
        self._registered = RegisteredModels(origins, target.check_layers, config.tokenizer, drafts_itself)
        named = partial(arithmetic_of, target, config.target)
        identity = Identity(arithmetic=named(weights), tokenizer=config.tokenizer)
        self._grammars = CompiledGrammars(config.target.model_path, target.vocab_size, target.eos_token_ids)
        self._comparing = Comparing(origins, budget, target.vocab_size)
        self._contest = self._learnt.read(Contest.from_object) or Contest()
        self.loop = DecodingLoop(
            target, self._comparing.origins, budget, config.loop, worker,
            grammars=self._grammars, identity=identity, metrics=metrics, contest=self._contest,
        )  # fmt: skip
        reloads = self._reloading = Reloading(target, config.target, self.loop, config.weights_from, named)
        self._adapting = Adapting(target, config.target.lora_folders, reloads.reading, lambda: self._reloading.open)
        self._check = SelfCheck(self.loop, config.check_every if target.exact else 0, metrics)
        metrics.follow("kv_cache_usage_ratio", lambda: {(): self.cache_use})
        metrics.follow("arithmetic_info", lambda: {(self.loop.identity.arithmetic,): 1.0})

    async def start(self) -> None:
        """Begin to decode."""
        await self._grammars.prepare()
        await self.loop.start()

    async def stop(self) -> None:
        """End every request and shut the target down."""
        await self._check.stop()
        await self.loop.stop()
        if self._contest.learnt:
            self._learnt.write(self._contest.as_object())
        await asyncio.to_thread(self._target.shutdown)

    @property
    def healthy(self) -> bool:
        """Whether requests are being decoded now."""
        return self.loop.healthy

    @property
    def cache_use(self) -> float:
        """Share of the key-value pool that live requests hold."""
        blocks = self._target.blocks
        return 1 - blocks.available / blocks.total

    @property
    def alive(self) -> bool:
        """Whether requests will be decoded, now or once the target has recovered."""
        return self.loop.alive

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        name, sampling = log_name(request.request_id, request.traceparent), request.sampling
        log.info("request %s: %d tokens after %d", name, sampling.max_tokens, len(request.prompt) + len(request.committed))
        if not request.adapter:
            return self._answer(request)
        return self._adapting.answering(request, self._answer, self.loop.identity.arithmetic)

    def _answer(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        return self._check.watched(request, self.loop.generate(request))

    def _with_adapters(self) -> dict[str, str]:
        """The arithmetic of answers with each adapter, by its name."""
        own = self.loop.identity.arithmetic
        return {name: with_adapter(own, digest) for name, digest in self._target.adapters.items()}

    async def compare(self, request: GenerationRequest, plans: Sequence[Plan]) -> tuple[ReplayedAnswer, ...]:
        return await self._comparing.compare(request, plans)

    async def forget(self, tenant: str) -> None:
        await self._check.forget(tenant)
        await self.loop.forget(tenant)

    async def adapt(self, order: AdapterOrder) -> str:
        if order.step in ("undo", "drop"):
            # It may be about to decode with that adapter.
            await self._check.stop()
        return await self._adapting.obey(order)

    async def reload(self, order: ReloadOrder) -> str:
        return await self._reloading.obey(order)

    async def replaced_weights(self) -> tuple[str, str]:
        """The folder of the weights that have taken the place of the first ones, and their digest; empty: none have. The
        answer comes once no reload is under way."""
        return await self._reloading.replaced()

    async def take_weights(self, folder: str, digest: str) -> None:
        """Serve the weights that another verifier serves.

        Raises:
            OutriderError: they cannot be served here, or are not there any more.
        """
        await self._reloading.take(folder, digest)

    async def describe(self) -> VerifierCard:
        """What is served, and the load.

        Raises:
            Unavailable: the loop cannot decode at present.
        """
        if not self.healthy:
            raise Unavailable("the verifier's decoding loop is not running")
        return VerifierCard(
            model=self._config.model_name,
            max_model_len=self._target.max_model_len,
            vocab_size=self._target.vocab_size,
            running=self.loop.running,
            waiting=self.loop.waiting,
            free_blocks=self._target.blocks.available,
            total_blocks=self._target.blocks.total,
            bit_exact=self._target.exact,
            defaults=self._target.generation.defaults,
            processors=self._target.generation.processors.shown,
            arithmetic=self.loop.identity.arithmetic,
            counts=_counts(self.loop.stats),
            drafters={origin.name: origin.link.connected for origin in self._origins},
            adapters=self._with_adapters(),
            paused=self._reloading.paused,
            pause_id=self._reloading.pause_id,
            weights=replace(self._weights, stored=self._reloading.stored or self._weights.stored),
            held=self._registered.held,
        )


def _counts(stats: LoopStats) -> DecodingCounts:
    return DecodingCounts(
        tokens=sum(counts.tokens for counts in stats.by_strategy.values()),
        passes=sum(counts.passes for counts in stats.by_strategy.values()),
        prompt_tokens=stats.prompt_tokens,
        cached_prompt_tokens=stats.prompt_tokens_cached,
        drafted_by_source=stats.nodes_by_source,
        accepted_by_source=stats.accepted_by_source,
        saved_s=stats.saved_s,
    )


def _budget(target: TransformersTarget, config: VerifierConfig) -> Budget:
    if config.budget == "fixed":
        return FixedBudget(max_nodes=config.max_nodes)
    costs = costs_of(target, config.target, config.costs_dir)
    return measured_budget(costs, max_nodes=config.max_nodes, max_step_s=config.max_step_s)


def _kept_contest(target: TransformersTarget, config: VerifierConfig) -> Kept:
    """Where it is kept what steps have shown of drafting as a whole. It holds for this machine and model alone."""
    about = {"contest": _CONTEST_FORMAT, **machine_and_model(target, config.target)}
    return Kept(config.costs_dir if config.keep_learnt else None, about)


def arithmetic_of(target: TransformersTarget, config: TargetConfig, weights: str, definition: int = DEFINITION) -> str:
    """A short hash that differs where tokens could: by ``weights`` (a digest of theirs), dtype, device and kernels.

    Our own kernels for a CPU give the same bits on every instruction set, from weights in either format, unless blocks have
    their inputs in another order than numbers.

    Args:
        definition: by which the kernels for GPUs compute.
    """
    kernels = target.kernels
    multiplied = [kernels.linears] if kernels.linears == "native" else kernels.about
    device = target.device.type if target.device.type == "cpu" else (target.device.type, definition)
    told: tuple[object, ...] = (weights, config.dtype, device, config.attention_backend, multiplied, target.exact)
    if config.rounds_cache:
        told += ("fp8 keys and values",)
    if kernels.weights == "as_stored" and _reordered(config):
        told += ("inputs in the order of their groups",)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def _reordered(config: TargetConfig) -> bool:
    try:
        with WeightFiles(Path(config.model_path)) as files:
            return files.reordered
    except ConfigurationError:
        # They may be gone, once others have taken their place.
        return False


def _named_weights(config: TargetConfig) -> str:
    """A digest of every byte of the weights, so that it is the same however many processes share them."""
    try:
        return weights_digest(Path(config.model_path))
    except ConfigurationError:
        # They are loaded meanwhile, which says more.
        return ""
