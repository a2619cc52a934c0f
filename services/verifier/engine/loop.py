"""The decoding loop: owns all live requests, never waits for long, commits only what the target chose.

One step, for all requests at once:

1. admit   requests that wait, as far as the target has room
2. draft   take the trees that lie ready; wait for missing ones at most until the step's deadline
3. begin   a pass over every request's rows: a chunk of its prompt, or its pending token and its tree
4. finish  the oldest pass, walk each tree, keep the accepted rows
5. deliver tokens to the consumers, reports to the drafters; free what has ended

A target of several stages has as many passes under way, each with its share of the requests, so that all stages work.
Steps 3 and 4 run in a worker thread, so that the event loop keeps serving links and clients meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple, Unpack

from services.verifier.engine.admission import Admission
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.forgetting import Forgetting
from services.verifier.engine.live_request import LiveRequest, check_request
from services.verifier.engine.passes import Part, decoding_load, finish_pass, load_of, plan_parts
from services.verifier.engine.stats import LoopStats
from speculation import limits
from speculation.budget import Budget, Wanted
from speculation.errors import Internal, MalformedTree, OutriderError, TargetLost
from speculation.errors import Unavailable as UnavailableError
from speculation.messages import CloseSession, Draft, DraftingReply, Finished, Forgotten, GenerationRequest, Progress
from speculation.ports import DraftLink, Target
from speculation.tree import validate

log = logging.getLogger(__name__)

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")

# So many failed steps in a row, and the target is given up for broken.
_MAX_FAILURES = 3
# Share of a pass that is waited for drafts where they are sent ahead, and weight of the latest pass in what one takes.
_SHARE_AHEAD = 0.03
_PASS_WEIGHT = 0.2


class DecodingLoop:
    """Decodes requests on one target with the help of one drafter.

    Args:
        worker: the one thread that touches the target; the loop shuts it down when it stops.
    """

    def __init__(
        self, target: Target, link: DraftLink, budget: Budget, config: LoopConfig, worker: ThreadPoolExecutor
    ) -> None:
        self.config = config
        self.stats = LoopStats()
        self._target = target
        self._link = link
        self._budget = budget
        self._requests = Admission(target, config, self.stats)
        self._under_way: deque[list[Part]] = deque()
        self._wake = asyncio.Event()
        self._draft_came = asyncio.Event()
        self._forgetting = Forgetting(target, link)
        self._failures = 0
        self._pass_s = 0.0
        self._recovering = False
        self._worker = worker
        self._task: asyncio.Task[None] | None = None

    # --- for the service ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect to the drafter and begin to decode."""
        await self._link.start(self)
        self._task = asyncio.create_task(self._run(), name="decoding-loop")

    async def stop(self) -> None:
        """End every request with ``Unavailable`` and let go of everything."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        gone = UnavailableError("the verifier is shutting down")
        await asyncio.to_thread(self._worker.shutdown)
        self._fail_all(gone)
        await self._link.stop()

    @property
    def alive(self) -> bool:
        """Whether the loop runs, and its steps succeed, or will when the target has been built anew."""
        return self._task is not None and not self._task.done() and self._failures < _MAX_FAILURES

    @property
    def healthy(self) -> bool:
        """Whether requests are decoded now."""
        return self.alive and not self._recovering

    @property
    def running(self) -> int:
        """Requests being decoded."""
        return len(self._requests.live)

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._requests.waiting)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        """Decode one request; see ``VerifierPort.generate``."""
        session = self._submit(request)
        try:
            while True:
                event = await session.events.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            session.closed = True
            self._wake.set()

    def forget(self, tenant: str) -> None:
        """Delete what is remembered of a tenant's requests: here before the next pass, at the drafter when it hears of it.

        Raises:
            Unavailable: the loop does not run.
        """
        if not self.alive:
            raise UnavailableError("the verifier is not running")
        for session in (*self._requests.live.values(), *self._requests.waiting):
            if session.tenant == tenant:
                session.forget_tenant()
        self._forgetting.forget(tenant)
        self._wake.set()

    def _submit(self, request: GenerationRequest) -> LiveRequest:
        # While the target is being restarted, requests wait for it.
        if not self.alive:
            raise UnavailableError("the verifier is not running")
        check_request(request, self._target)
        self._requests.check(request)
        session = LiveRequest(
            request,
            self._target.pipeline(request.sampling, len(request.prompt)),
            self._target.eos_token_ids,
            max_model_len=self._target.max_model_len,
            max_nodes=self._budget.max_nodes,
        )
        if (reason := session.ended) is not None:
            session.finish(reason)
            return session
        self._requests.waiting.append(session)
        self._wake.set()
        return session

    # --- for the draft link -------------------------------------------------------------------------------------

    def on_reply(self, reply: DraftingReply) -> None:
        """See ``DraftReceiver``. A malformed draft is dropped: it may cost speed, nothing else."""
        if isinstance(reply, Forgotten):
            return
        session = self._requests.find(reply.session_id)
        if session is None:
            return
        if isinstance(reply, Draft):
            try:
                validate(reply.tree, vocab_size=self._target.vocab_size, max_nodes=limits.MAX_TREE_NODES)
                session.drafts.add(reply)
            except MalformedTree as error:
                self.stats.drafts_malformed += 1
                session.drafts.none_for(len(session.tokens))
                log.warning("dropped a draft for %s: %s", reply.session_id, error)
        else:
            log.warning("no draft for %s: %s", reply.session_id, reply.reason[:200])
            if session.drafts.failed(len(session.tokens), reopen=reply.reopen):
                self._open_drafting(session)
        self._draft_came.set()

    def on_connected(self) -> None:
        """See ``DraftReceiver``: tell a drafter that joins late what is committed."""
        self._forgetting.connected()
        for session in self._requests.admitted():
            session.drafts.start_over()
            self._open_drafting(session)

    # --- the loop -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                self._drop_closed()
                self._forgetting.between_passes()
                for session in self._requests.admit():
                    self._open_drafting(session)
                await self._fill()
                if self._under_way:
                    await self._complete(self._under_way.popleft())
                    self._failures = 0
                    continue
            except TargetLost as error:
                await self._recover(error)
                continue
            except Exception as error:
                log.exception("a decoding step failed")
                self._failures += 1
                await self._abandon()
                unknown = Internal("the decoding step failed; the server's log says why")
                self._fail_live(error if isinstance(error, OutriderError) else unknown)
                continue
            if self._requests.live or self._requests.waiting:
                await asyncio.sleep(0)
                continue
            self._wake.clear()
            await self._wake.wait()

    async def _recover(self, lost: TargetLost) -> None:
        """Build the target anew. Whoever asks for the requests' answers may ask again: nothing committed is lost."""
        log.error("the target is lost and built anew: %s", lost)
        self._recovering = True
        self._under_way.clear()
        self._lose_live(UnavailableError("the target is being restarted; try again"))
        while self._failures < _MAX_FAILURES:
            self._failures += 1
            try:
                await self._in_worker(self._target.recover)
                self._recovering = False
                return
            except TargetLost as error:
                log.error("and lost again: %s", error)
            except Exception:
                log.exception("the target cannot be built anew")
                self._failures = _MAX_FAILURES
        self._recovering = False
        self._fail_all(UnavailableError("the target is lost"))

    async def _abandon(self) -> None:
        """Finish what is under way, for nobody."""
        while self._under_way:
            self._under_way.popleft()
            try:
                await self._in_worker(self._target.finish)
            except TargetLost as error:
                await self._recover(error)
            except Exception:
                log.exception("a pass failed after another had")

    def _fail_live(self, error: OutriderError) -> None:
        for session in list(self._requests.live.values()):
            session.fail(error)
            self._release(session)

    def _lose_live(self, error: OutriderError) -> None:
        """Without freeing anything: what the target held is lost, or a pass with its rows may be under way still."""
        for session in list(self._requests.live.values()):
            session.fail(error)
            self._forget(session)

    def _fail_all(self, error: OutriderError) -> None:
        self._lose_live(error)
        while self._requests.waiting:
            self._requests.waiting.popleft().fail(error)

    async def _fill(self) -> None:
        """Begin passes until there is one for every stage; requests that are in one share none of the others."""
        while len(self._under_way) < self._target.depth:
            share = -(-len(self._requests.live) // self._target.depth)
            idle = [session for session in self._requests.live.values() if not session.in_pass]
            sessions = self._requests.make_room(idle[:share], wait=bool(self._under_way))
            if not sessions:
                return
            times = self.stats.times
            with times.measure("draft_wait"):
                await self._await_drafts(sessions)
            with times.measure("schedule"):
                everybody = decoding_load(self._requests.live.values())
                parts = plan_parts(sessions, self._budget, self.config.max_batched_tokens, everybody)
            for part in parts:
                part.session.in_pass = True
            with times.measure("begin"):
                await self._in_worker(self._target.begin, [part.rows for part in parts])
            self._under_way.append(parts)

    async def _complete(self, parts: list[Part]) -> None:
        """Finish a pass and give everybody what it brought."""
        times = self.stats.times
        before = times.seconds.get("forward", 0.0)
        try:
            with times.measure("pass_and_verify"):
                await self._in_worker(finish_pass, self._target, parts, times)
        finally:
            for part in parts:
                part.session.in_pass = False
        took = times.seconds["forward"] - before
        self._pass_s += _PASS_WEIGHT * (took - self._pass_s)
        self._learn(parts, took)
        with times.measure("deliver"):
            wanted = self._budget.wanted(decoding_load(self._requests.live.values()))
            for part in parts:
                self._deliver(part, wanted)
        times.steps += 1
        # Consumers and links get their turn before the next pass takes the processor.
        with times.measure("stream"):
            await asyncio.sleep(0)

    def _learn(self, parts: list[Part], seconds: float) -> None:
        """Tell the budget what came of a pass."""
        if any(part.rows.chain > 1 for part in parts):
            self._budget.learn_prompts(load_of(parts), seconds)
            return
        outcomes = [(part.tree, part.verdict.accepted_path) for part in parts if part.verdict is not None and len(part.tree)]
        self._budget.learn(load_of(parts), seconds, outcomes)

    async def _in_worker(self, function: Callable[[Unpack[_Arguments]], _Result], *arguments: *_Arguments) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)

    def _open_drafting(self, session: LiveRequest) -> None:
        if session.request.plan.speculates:
            self._link.open(session.opening())

    def _drop_closed(self) -> None:
        for session in self._requests.left():
            self._release(session)

    def _release(self, session: LiveRequest) -> None:
        self._target.close(session.id)
        self._forget(session)

    def _forget(self, session: LiveRequest) -> None:
        self._requests.forget(session)
        if session.request.plan.speculates:
            self._link.close(CloseSession(session_id=session.id))
        if session.tenant != session.request.tenant:
            self._forgetting.forget(session.tenant)

    async def _await_drafts(self, sessions: list[LiveRequest]) -> None:
        """Wait until every request that will be verified has its draft, but not beyond the deadline."""
        wanting = [s for s in sessions if s.request.plan.speculates and s.computed == len(s.tokens) - 1]
        pays = self._budget.wanted(decoding_load(sessions)).nodes > 0
        missing = [session for session in wanting if pays and session.drafts.worth_waiting(session.tokens)]
        deadline = time.perf_counter() + self._patience_s(missing)
        while missing and self._link.connected and (left := deadline - time.perf_counter()) > 0:
            self._draft_came.clear()
            try:
                async with asyncio.timeout(left):
                    await self._draft_came.wait()
            except TimeoutError:
                break
            missing = [s for s in missing if s.drafts.worth_waiting(s.tokens) and not s.closed]
        for session in wanting:
            # A draft that nobody wanted has not been missed.
            if pays or session.drafts.ready(session.tokens):
                self.stats.count_draft(session.drafts.count_step(session.tokens))

    def _patience_s(self, missing: list[LiveRequest]) -> float:
        """How long a step waits for these requests' drafts."""
        if not any(session.drafts.ahead for session in missing):
            return self.config.draft_deadline_s
        # What would come now comes ahead of the next step, or is of use in part: the target had better work.
        return min(self.config.draft_deadline_s, _SHARE_AHEAD * self._pass_s)

    def _deliver(self, part: Part, wanted: Wanted) -> None:
        session, verdict = part.session, part.verdict
        if part.error is not None:
            known = isinstance(part.error, OutriderError)
            if not known:
                log.error("verification failed for %s", session.id, exc_info=part.error)
            session.fail(part.error if known else Internal("verification failed; the server's log says why"))
            self._release(session)
            return
        session.computed += part.rows.chain
        if verdict is None:
            return
        session.computed += len(verdict.accepted_path)
        self.stats.count_tree(part.tree, verdict.accepted_path)
        session.commit(verdict.committed)
        session.events.put_nowait(
            Progress(
                token_ids=verdict.committed,
                queue_s=session.queue_s,
                num_drafted=len(part.tree) - len(part.tree.probes),
                accepted_sources=tuple(part.tree.sources[node] for node in verdict.accepted_path),
                logprobs=verdict.logprobs,
            )
        )
        if verdict.finish_reason is not None:
            session.finish(verdict.finish_reason)
            self._release(session)
        elif session.request.plan.speculates and not session.drafts.given_up:
            self._link.step(session.report(verdict, wanted))
