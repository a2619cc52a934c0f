"""The router's link to the verifiers, on Ray Serve's handles."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, cast

from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from cluster.ray.calling_routers import BEAT_S
from cluster.ray.open_streams import OPEN_STREAMS
from cluster.ray.sticky_router import named
from cluster.verifiers.choice import attempt_of, session_of
from cluster.verifiers.same_answer import same_adapter, same_weights
from services.links import serialised
from speculation import limits
from speculation.adapters import AdapterOrder
from speculation.errors import Internal, NodeTaken, NotBegun, OutriderError, ResourceExhausted, Unavailable
from speculation.messages import Finished, GenerationRequest, Progress, ReplayedAnswer, ServiceState, VerifierCard
from speculation.reloads import ReloadOrder
from speculation.types import Plan

log = logging.getLogger(__name__)


# Verifiers asked at once to describe themselves, and seconds after which the next one is: of silence, and after a failure.
_MOST_ASKED, _ASK_ANOTHER_S, _AFTER_A_FAILURE_S = 3, 1.0, 0.25


class ServeVerifierLink:
    """Implements ``speculation.ports.VerifierLink`` on Serve handles; ``forget`` reaches the drafters as well.

    Args:
        drafters: None: there is one elsewhere, which the verifiers tell.

    Attributes:
        streams: open calls of ``generate``.
    """

    def __init__(self, handle: DeploymentHandle, drafters: DeploymentHandle | None) -> None:
        self._handle = handle
        self._drafters = drafters
        self._name = uuid.uuid4().hex
        self._beating: asyncio.Task[None] | None = None
        self.streams = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        self.streams += 1
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat(), name="router-lives")
        began = False
        try:
            attempt = attempt_of(request.request_id)
            try:
                async with aclosing(self._generate(request, attempt)) as events:
                    async for event in events:
                        began = True
                        yield event
            except ResourceExhausted:
                if began:
                    raise
                # What is known of the others' load may be old: one of them may have room.
                async with aclosing(self._generate(request, attempt + 1)) as events:
                    async for event in events:
                        yield event
        finally:
            self.streams -= 1

    async def _generate(self, request: GenerationRequest, attempt: int) -> AsyncGenerator[Progress | Finished, None]:
        session = session_of(request.tenant, request.prompt, attempt)
        with OPEN_STREAMS.opened() as stream:
            verifier = self._handle.options(stream=True, session_id=named(stream, session))
            events = verifier.generate.remote(serialised.REQUEST.write(request), self._name)
            finished = False
            try:
                async for event in events:
                    message = await serialised.read_event(event)
                    finished = isinstance(message, Finished)
                    if finished:
                        # Who reads this may ask again at once, and should find its verifier free.
                        OPEN_STREAMS.ended(stream)
                    yield message
            except Exception as error:
                raise translate(error) from None
            finally:
                if not finished:
                    events.cancel()

    async def _beat(self) -> None:
        """Tell the verifiers that this router lives, as long as there are streams that would otherwise be given up."""
        while True:
            await asyncio.sleep(BEAT_S)
            if not self.streams:
                continue
            try:
                said = self._handle.broadcast("caller_lives", self._name)
                await said.results_async(timeout_s=BEAT_S, return_exceptions=True)
            except Exception as error:
                log.info("not all verifiers have heard that this router lives: %s", error)

    async def compare(self, request: GenerationRequest, plans: Sequence[Plan]) -> tuple[ReplayedAnswer, ...]:
        """As ``VerifierPort.compare``: of any verifier."""
        try:
            found = await self._handle.compare.remote(serialised.COMPARING.write((request, plans)))
        except Exception as error:
            raise translate(error) from None
        return serialised.COMPARISONS.read(found)

    async def describe(self) -> VerifierCard:
        """As ``VerifierPort.describe``: of any verifier, the first one that answers."""
        asked: set[asyncio.Task[bytes]] = set()
        try:
            while True:
                if len(asked) < _MOST_ASKED:
                    # The least loaded one gets it. One that hangs has more and more to do, and so another one comes next.
                    asked.add(asyncio.create_task(self._describe()))
                done, _ = await asyncio.wait(asked, timeout=_ASK_ANOTHER_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    asked.discard(task)
                    if task.exception() is None or not asked:
                        return serialised.CARD.read(task.result())
                if done:
                    # A verifier that is gone says so at once, as often as it is asked.
                    await asyncio.sleep(_AFTER_A_FAILURE_S)
        except Exception as error:
            raise translate(error) from None
        finally:
            for task in asked:
                task.cancel()

    async def _describe(self) -> bytes:
        return cast(bytes, await self._handle.describe.remote())

    async def service_state(self) -> ServiceState:
        cards, components = await asyncio.gather(self._cards(), replicas(self._handle.app_name))
        return ServiceState(verifiers=cards, components=components)

    async def _cards(self) -> tuple[VerifierCard, ...]:
        """Of all verifiers that answer; while one of them hangs, of the first that does."""
        try:
            said = await self._handle.broadcast("describe").results_async(timeout_s=_ASK_ANOTHER_S, return_exceptions=True)
            return tuple(serialised.CARD.read(answer) for answer in said if isinstance(answer, bytes))
        except (TimeoutError, DeploymentUnavailableError, RayError):
            pass
        try:
            return (await self.describe(),)
        except OutriderError:
            return ()

    async def reload(self, order: ReloadOrder) -> str:
        """At every replica.

        Raises:
            OutriderError: one could not take the step, or did not answer.
        """
        return await self._everywhere("reload", serialised.RELOAD.write(order), order.patience_s, same_weights)

    async def forget(self, tenant: str) -> None:
        """Delete what is stored of a tenant's requests, at every replica.

        Drafters are told directly as well, since no verifier may be connected to one. The verifiers come first, so that
        afterwards none of them sends a drafter anything under the tenant's name.

        Raises:
            Unavailable: not all replicas have confirmed.
        """
        told = [await tell_all(handle, "forget", tenant) for handle in (self._handle, self._drafters) if handle is not None]
        if missed := [word for word in told if word is not None]:
            raise Unavailable(f"{'; '.join(missed)}; try again")

    async def adapt(self, order: AdapterOrder) -> str:
        """As ``VerifierPort.adapt``: at every replica."""
        written, within_s = serialised.ADAPTING.write(order), order.within_s + limits.ADAPT_S
        return await self._everywhere("adapt", written, within_s, partial(same_adapter, order))

    async def _everywhere(
        self, method: str, order: bytes, within_s: float, judged: Callable[[list[str | BaseException]], str]
    ) -> str:
        """Give an order to every replica.

        Args:
            judged: says what all have answered, errors among them; raises one where there is one.

        Raises:
            OutriderError: one could not follow it, or did not answer.
        """
        try:
            total = await asyncio.wait_for(_count(self._handle), limits.FORGET_S)
            told = self._handle.broadcast(method, order)
            answers = await told.results_async(timeout_s=within_s, return_exceptions=True)
        except TimeoutError:
            raise Unavailable(f"not all verifiers have answered within {within_s:g} s; try again") from None
        except Exception as error:
            raise translate(error) from None
        found = judged([translate(each) if isinstance(each, Exception) else each for each in answers])
        if len(answers) < total:
            raise Unavailable(f"{total - len(answers)} of {total} verifiers did not answer; try again")
        return found


def translate(error: Exception) -> OutriderError:
    """Convert errors raised by Ray, its own or wrapped ones of ours, to ours."""
    # Ray wraps a remote error in one whose text is the remote traceback; the original error is its cause.
    if isinstance(error, RayTaskError):
        error = cast(Any, error).cause
    if isinstance(error, OutriderError):
        return error
    if isinstance(error, BackPressureError):
        return ResourceExhausted("too many requests wait for the verifier")
    if isinstance(error, DeploymentUnavailableError):
        return NotBegun("no verifier runs; try again")
    if isinstance(error, RayActorError) and error.preempted:
        return NodeTaken("the verifier's node was taken away; try again")
    if isinstance(error, RayError):
        return Unavailable("the verifier is gone or restarting; try again")
    log.error("the verifier failed", exc_info=error)
    return Internal("the verifier failed; the router's log says why")


# In these states a replica holds nothing of any request.
_EMPTY = ("starting", "stopped")


async def tell_all(handle: DeploymentHandle, method: str, *arguments: object) -> str | None:
    """Call ``method`` of every replica. Returns a sentence on how many failed, None if all succeeded.

    Serve's broadcast silently skips replicas that it cannot reach or that are stopping, so the replicas are counted first.
    Each of the two may take ``limits.FORGET_S``.
    """
    within_s = limits.FORGET_S
    name, total = handle.deployment_name, 0
    try:
        total = await asyncio.wait_for(_count(handle), within_s)
        answers = await handle.broadcast(method, *arguments).results_async(timeout_s=within_s, return_exceptions=True)
    except TimeoutError:
        return f"not all of {total or 'the'} {name} replicas answered within {within_s:g} s"
    except (DeploymentUnavailableError, RayError) as error:
        log.warning("no %s replica could be reached for %s: %s", name, method, error)
        answers = []
    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    for reason in failed:
        log.warning("%s on a %s replica failed: %s", method, name, reason)
    total = max(total, len(answers), 1)
    missed = total - (len(answers) - len(failed))
    return f"{missed} of {total} {name} replicas did not answer" if missed else None


async def _count(handle: DeploymentHandle) -> int:
    """Number of replicas that may hold data of requests."""
    states = (await replicas(handle.app_name)).get(handle.deployment_name, {})
    return sum(number for state, number in states.items() if state not in _EMPTY)


async def replicas(application: str) -> dict[str, dict[str, int]]:
    """How many replicas an application of Serve's has, by deployment and state, such as "running"."""
    status = await asyncio.to_thread(serve.status)
    found = status.applications.get(application)
    deployments = {} if found is None else found.deployments
    return {
        name: {str(getattr(state, "value", state)).lower(): number for state, number in deployment.replica_states.items()}
        for name, deployment in deployments.items()
    }
