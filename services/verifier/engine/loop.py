"""The decoding loop: owns all live requests, never waits for long, and commits only what the target chose.

One step, for all requests at once:

1. admit   waiting requests while the target has room
2. draft   collect the trees at hand; wait for missing ones while that pays
3. begin   a pass over every request's rows: a prompt chunk, or its pending token and its tree
4. finish  the oldest pass; verify each tree and keep the accepted rows
5. deliver reports to the drafters, which draft at once; release ended requests; send tokens while the next pass runs

With several pipeline stages, as many passes are under way, each over a share of the requests, so that no stage is idle.
Passes run in a worker thread, so that the event loop can serve links and clients meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor

from services.metrics.registry import DROPPED, Metrics
from services.verifier.engine.admission import Admission
from services.verifier.engine.clock import now
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.deciding.asking import known_prices
from services.verifier.engine.deciding.contest import Contest
from services.verifier.engine.deciding.draft_wait import DraftWait
from services.verifier.engine.deciding.lessons import Lessons, PassTimes
from services.verifier.engine.deciding.named_share import NamedShare
from services.verifier.engine.deciding.step_contest import StepContest
from services.verifier.engine.delivery import Delivery
from services.verifier.engine.drafting import Drafting
from services.verifier.engine.faults import Faults
from services.verifier.engine.forgetting import Forgetting
from services.verifier.engine.identity import UNNAMED, Identity
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.loop_metrics import LoopMetrics
from services.verifier.engine.origins import Origin
from services.verifier.engine.pass_queue import PassHung, PassQueue
from services.verifier.engine.pass_report import PassFigures
from services.verifier.engine.passes import PassWork, decoding_load, load_to_come, plan_parts, size_of
from services.verifier.engine.pause import Hold, Pause
from services.verifier.engine.request_checks import check_request
from services.verifier.engine.singles import Singles, singled_out
from services.verifier.engine.stats import LoopStats
from services.verifier.grammar.compiled_grammars import CompiledGrammars
from services.verifier.grammar.grammar_state import GrammarState
from services.verifier.model.target_port import Target
from speculation.budget import Budget
from speculation.costs import Load
from speculation.errors import Internal, InvalidArgument, NotBegun, OutriderError, TargetLost, Unavailable
from speculation.messages import Finished, GenerationRequest, Progress

log = logging.getLogger(__name__)


class DecodingLoop:
    """Decodes requests on one target, with drafts from any number of origins.

    Args:
        origins: where drafts come from; may be empty.
        worker: a single thread, the only one that touches the target; the loop shuts it down when it stops.
        grammars: compiles the grammars of requests whose answers must have a form; None: such requests are refused.
        metrics: where its numbers go.
        contest: what is known of drafting as a whole; None: nothing is.

    Attributes:
        identity: by what tokens are chosen.
        pause: lets what is under way end, so that the target may be changed.
        hold: lets no pass begin.
    """

    def __init__(
        self,
        target: Target,
        origins: Sequence[Origin],
        budget: Budget,
        config: LoopConfig,
        worker: Executor,
        *,
        grammars: CompiledGrammars | None = None,
        identity: Identity = UNNAMED,
        metrics: Metrics = DROPPED,
        contest: Contest | None = None,
    ) -> None:
        self.config = config
        self.identity = identity
        self._grammars = grammars
        self.stats = LoopStats()
        self._target = target
        self._budget = budget
        self._requests = Admission(target, config, self.stats)
        self._wake = asyncio.Event()
        self.pause = Pause(self._requests, self._wake.set, self._release, self._made)
        self.hold = Hold(self._wake.set)
        self._metrics = LoopMetrics(metrics, self.stats, self._requests)
        self._forgetting = Forgetting(target, {origin.name: origin.link for origin in origins}, config.forget_within_s)
        timed = math.isfinite(budget.seconds(Load(rows=1, requests=1, keys=0)))
        self._drafting = Drafting(
            origins, self._requests, config, self.stats, self._forgetting, target.vocab_size, target.depth, timed=timed
        )
        self._named = NamedShare(config.named_share)
        step_contest = StepContest(budget, self._drafting, contest or Contest())
        self._lessons = Lessons(budget, self._drafting, step_contest, self._named)
        self._draft_wait = DraftWait(self._drafting, budget, self.stats, self._named, config)
        self._delivery = Delivery(self.stats, self._drafting, self._draft_wait, self._fail, self._release)
        self._passes = PassQueue(target, worker, self.stats.times, deadline_s=config.pass_deadline_s, hung=self._hung)
        self._faults = Faults(target, self._requests, self._passes, self._forget, self.pause.lost)
        # Found while the target was changed.
        self._lost: TargetLost | None = None
        # When the last pass ended, or decoding began, in seconds of the event loop's clock.
        self._pass_ended = 0.0
        self._task: asyncio.Task[None] | None = None

    # --- for the service ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect to the draft origins and begin to decode."""
        await self._drafting.start()
        self._task = asyncio.create_task(self._run(), name="decoding-loop")

    async def stop(self) -> None:
        """End every request with ``Unavailable``, disconnect from the origins and shut the worker down."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        stopped = "the verifier was stopped"
        self.pause.give_up(stopped)
        self.hold.end(stopped)
        await self._passes.stop()
        self._delivery.stream()
        self._faults.lose(Unavailable("the verifier is shutting down"), waiting=True)
        await self._drafting.stop()
        if self._grammars is not None:
            self._grammars.stop()

    @property
    def alive(self) -> bool:
        """Whether the loop runs and can decode, now or once the target is rebuilt or a hung pass returns."""
        return self._task is not None and not self._task.done() and not self._faults.broken

    @property
    def healthy(self) -> bool:
        """Whether requests are being decoded now."""
        return self.alive and not self._faults.recovering and not self._passes.hanging and not self._passes.overdue

    @property
    def running(self) -> int:
        """Requests being decoded."""
        return len(self._requests.running)

    def _speculates(self, singles: Singles) -> bool:
        """Whether any running request may be drafted for; ``singles`` may not."""
        running = self._requests.running
        return len(singles) < len(running) and any(request.speculates for request in running.values())

    @property
    def waiting(self) -> int:
        """Requests in the waiting queue."""
        return len(self._requests.waiting)

    async def generate(self, message: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        """Decode one request; see ``VerifierPort.generate``."""
        request = self._submit(message, await self._open_grammar(message))
        try:
            while True:
                event = request.events.take()
                if isinstance(event, Progress):
                    yield event
                elif event is None:
                    await request.events.came()
                elif isinstance(event, Finished):
                    yield event
                    return
                else:
                    raise event
        finally:
            self._requests.leave(request.latest)
            self._wake.set()
            self._drafting.came.set()  # A wait for its drafts ends.

    async def forget(self, tenant: str) -> None:
        """Delete what is stored of a tenant's requests, at the target before the next pass and at every draft origin.

        Raises:
            Unavailable: the loop does not run, or not all have confirmed in time; names those.
        """
        if not self.alive:
            raise Unavailable("the verifier is not running")
        for request in (*self._requests.running.values(), *self._requests.waiting):
            if request.tenant == tenant:
                request.forget_tenant()
        self._wake.set()
        await self._forgetting.forget(tenant)

    async def change(self, change: Callable[[], None]) -> None:
        """Call what changes the target, in its thread and in a pause.

        Where a part of the target is lost by it, the target has changed all the same, and is rebuilt before the next pass.
        """
        try:
            await self._passes.change(change)
        except TargetLost as lost:
            self._lost = lost
            self._wake.set()

    async def _open_grammar(self, message: GenerationRequest) -> GrammarState | None:
        if message.sampling.structured_outputs is None:
            return None
        if self._grammars is None:
            raise InvalidArgument("structured_outputs", "set", "unset: nothing here compiles grammars")
        self._check(message)
        return await self._grammars.open(message.sampling, message.committed, message.tenant)

    def _check(self, message: GenerationRequest) -> None:
        # Requests are accepted while the target is being rebuilt, and wait.
        if not self.alive or self._passes.hanging:
            raise NotBegun("the verifier is not running")
        self.identity.check(message)
        check_request(message, self._target)
        self._drafting.check(message.plan)
        self._requests.check(message)

    def _submit(self, message: GenerationRequest, grammar: GrammarState | None) -> LiveRequest:
        self._check(message)
        request = self._made(message, grammar)
        if (reason := request.complete) is not None:
            request.finish(reason)
            request.flush()
            return request
        self._requests.join(request)
        self._wake.set()
        return request

    def _made(self, message: GenerationRequest, grammar: GrammarState | None) -> LiveRequest:
        return LiveRequest(
            message,
            self._target.eos_token_ids,
            vocab_size=self._target.vocab_size,
            max_model_len=self._target.max_model_len,
            max_nodes=self._budget.max_nodes,
            by_paper=message.plan.by_paper,
            grammar=grammar,
            streams=self._target.streams(message.plan.observe_layers),
        )

    # --- the loop -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._step()
            except TargetLost as lost:
                await self._faults.recover(lost)
            except PassHung:
                await self._faults.returned()
                self.pause.lost()
            except Exception as error:
                await self._faults.failed(error)

    async def _step(self) -> None:
        # Whatever is asked for from here on has a step of its own.
        self._wake.clear()
        if (lost := self._lost) is not None:
            self._lost = None
            raise lost
        for request in self._requests.left():
            self._release(request)
        self._forgetting.between_passes()
        self.pause.look(len(self._passes))
        self.hold.look(len(self._passes))
        for request in () if self.hold.on else self._requests.admit():
            self._drafting.open(request, known_prices(load_to_come(self._requests.running.values()), self._budget))
        while not (self._passes.full or self.hold.on) and await self._begin_pass():
            pass
        if len(self._passes):
            await self._finish_pass()
            self._faults.succeeded()
            return
        self._delivery.stream()
        if not self.hold.on and (self._requests.running or self._requests.waiting.heads):
            await asyncio.sleep(0)
            return
        await self._idle()
        self._pass_ended = now()

    async def _idle(self) -> None:
        """Wait for something to do. A process that is lost meanwhile is found and replaced before a request waits for it."""
        if self._target.processes == 1:
            await self._wake.wait()
            return
        try:
            # Not ``wait_for``: before Python 3.12 it loses a cancellation that comes together with what it waits for.
            async with asyncio.timeout(self.config.idle_beat_s):
                await self._wake.wait()
        except TimeoutError:
            await self._passes.beat()

    async def _begin_pass(self) -> bool:
        """Steps 2 and 3 for one pipeline stage's share of the requests. Returns whether a pass was begun."""
        share = -(-len(self._requests.running) // self._target.depth)
        idle = [request for request in self._requests.running.values() if not request.in_pass]
        batch = self._requests.make_room(idle[:share], wait=len(self._passes) > 0)
        if not batch:
            return False
        singles, others = singled_out(batch)
        asked_at = now()
        if not self._drafting.quiet or any(request.by_paper for request in others):
            await self._wait_for_drafts(batch, singles, others)
        waited_s = now() - asked_at
        with self.stats.times.measure("schedule"):
            work = self._plan(singles, others)
        if len(work):
            await self._passes.begin(work, waited_s)
        return len(work) > 0

    def _plan(self, singles: Singles, others: list[LiveRequest]) -> PassWork:
        if not others:
            return PassWork(singles, [])
        everybody, rows = self._requests.running.values(), self.config.prompt_rows()
        parts, treed, failed = plan_parts(
            others, self._budget, rows, everybody, beside=singles.load, quiet=self._drafting.quiet, named=self._named
        )
        for request, error in failed:
            self._fail(request, error, "its pass could not be planned")
        return PassWork(singles, parts, treed)

    async def _wait_for_drafts(self, batch: list[LiveRequest], singles: Singles, others: list[LiveRequest]) -> None:
        with self.stats.times.measure("draft_wait"):
            try:
                if not others:
                    self._draft_wait.for_nobody(singles.load)
                    return
                await self._draft_wait.for_batch(batch, decoding_load(batch), self._delivery.stream)
            except Exception:
                # Missing drafts cost speed, and nothing else.
                log.exception("waiting for drafts failed")

    async def _finish_pass(self) -> None:
        """Steps 4 and 5."""
        began = now()
        begun, took = await self._passes.finish(meanwhile=self._delivery.stream)
        work, parts, ended = begun.work, begun.work.parts, now()
        times, self._pass_ended = PassTimes(took, ended - began, ended - self._pass_ended), ended
        with self.stats.times.measure("deliver"):
            # Without parts nobody asks what a draft is worth.
            load = decoding_load(self._requests.running.values()) if parts else work.singles.load
            size = size_of(work)
            prices = self._lessons.learn(work, size, times, load, speculates=self._speculates(work.singles))
            self.stats.count_rows(size.rows, size.stream_rows, size.observed_rows)
            self._delivery.deliver_singles(work.singles)
            if parts:
                wanted = self._budget.wanted(load)
                figures = PassFigures(ended - begun.begun_at, begun.waited_s, size.parts, self.identity.arithmetic)
                self._delivery.deliver_all(parts, wanted, prices, figures)
            self._drafting.open_missed(prices)
        self.stats.times.steps += 1
        self._metrics.step(work, times.seconds)

    def _hung(self) -> None:
        self._delivery.stream()
        self._faults.hung()

    def _fail(self, request: LiveRequest, error: Exception, what: str) -> None:
        """End one request with an error; the others go on."""
        known = isinstance(error, OutriderError)
        if not known:
            log.error("%s (request %s)", what, request.id, exc_info=error)
        request.fail(error if known else Internal(f"{what}; the server's log says why"))
        self._release(request)

    def _release(self, request: LiveRequest) -> None:
        self._target.close(request.id)
        self._forget(request)

    def _forget(self, request: LiveRequest) -> None:
        self._requests.forget(request)
        self._drafting.close(request)
        if request.tenant is not None and request.tenant != request.message.tenant:
            self._forgetting.tell(request.tenant)
