"""The ports between components. No tensor and nothing as long as the vocabulary crosses a service port.

::

    client -> RouterPort -> VerifierPort -> DecodingLoop -> Target        (one process: verifier/model/target_port.py)
                                                         -> DraftLink -> Drafter -> Retriever

``RouterPort`` is in ``services/api/messages.py``, with everything that users see. Implementations are in ``services`` (the
components), ``services/links`` (in-process and gRPC) and ``tests/engine/fakes.py``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Protocol, runtime_checkable

from speculation.adapters import AdapterOrder
from speculation.columns import DraftColumns, ReportColumns, SentReports
from speculation.held_models import DrafterCard
from speculation.messages import (
    CloseSession,
    Draft,
    DraftFailure,
    DraftingReply,
    FeatureChunk,
    Finished,
    ForgetTenant,
    GenerationRequest,
    OpenSession,
    Progress,
    RecalledAnswers,
    ReplayedAnswer,
    RetrievalQuery,
    Retrieved,
    ServiceState,
    StepReport,
    VerifierCard,
)
from speculation.reloads import ReloadOrder
from speculation.types import Plan


class DraftReceiver(Protocol):
    """The verifier's side of a draft link. Called on the event loop of the decoding loop; must not block."""

    def on_reply(self, reply: DraftingReply) -> None:
        """Take a draft, a failure to draft, or the answer to ``forget``."""

    def on_drafts(self, drafts: DraftColumns) -> None:
        """Take the drafts of several sessions, as ``on_reply`` takes each."""

    def on_connected(self) -> None:
        """The link has a drafter; it may be a new one that knows no session."""


class DraftLink(Protocol):
    """A connection to a drafter. Sending never blocks and never raises: a drafter can cost speed, nothing else."""

    @property
    def connected(self) -> bool:
        """Whether waiting for a draft makes sense."""

    async def start(self, receiver: DraftReceiver) -> None:
        """Connect, and keep connected until ``stop``."""

    def open(self, message: OpenSession) -> None:
        """Start a session."""

    def step(self, message: StepReport) -> None:
        """Report a step."""

    def steps(self, reports: SentReports) -> None:
        """Report steps of several sessions, as ``step`` reports each."""

    def features(self, message: FeatureChunk) -> None:
        """Send hidden states. If a drafter does not keep up, they are dropped first."""

    def close(self, message: CloseSession) -> None:
        """End a session."""

    def forget(self, message: ForgetTenant) -> None:
        """Delete everything about a tenant. ``Forgotten`` comes back when that is done."""

    async def stop(self) -> None:
        """Disconnect."""


@runtime_checkable
class DescribedDrafts(Protocol):
    """What a draft link may implement too: the drafter at its end has settings of its own, and tells what it holds."""

    @property
    def card(self) -> DrafterCard | None:
        """What it has told when it was connected last; None: nothing."""


class Retriever(Protocol):
    """Looks up what followed the end of a text in a corpus. Many queries may be under way at once."""

    async def retrieve(self, query: RetrievalQuery) -> Retrieved:
        """Answer one query.

        Raises:
            OutriderError: there is no answer now; a drafter goes on without.
        """


class AnswerStore(Protocol):
    """Keeps tenants' earlier answers for all drafters of a service.

    All methods raise ``OutriderError`` where the store cannot be reached; a drafter goes on without.
    """

    async def recall(self, tenant: str, after: str, drafter: str) -> RecalledAnswers:
        """What other drafters than ``drafter`` kept for a tenant.

        Args:
            after: ``last`` of an earlier call; empty: from the oldest one on.
        """

    async def keep(self, tenant: str, generation: int, drafter: str, tokens: Sequence[int]) -> bool:
        """Add an answer; False: the tenant was forgotten after ``generation``, so nothing is kept."""

    async def forget(self, tenant: str) -> None:
        """Delete a tenant's answers. Those of its present generation are not kept any more."""


class Drafter(Protocol):
    """Proposes trees. Calls for one session come one at a time, in order; different sessions may overlap."""

    async def open(self, message: OpenSession) -> Draft | DraftFailure | None:
        """Start a session (anew, if it exists) and draft. None: all drafts come from ``further``."""

    async def step(self, message: StepReport) -> Draft | DraftFailure | None:
        """Learn what was committed and draft what may follow. None: see ``open``."""

    def further(self, session_id: str) -> AsyncIterator[Draft]:
        """Drafts that are ready after the answer to the last call: other groups' drafts, and drafts made ahead.

        The caller leaves the iterator when the session's next call arrives. Unknown sessions yield nothing.
        """

    def features(self, message: FeatureChunk) -> None:
        """Hidden states of a session; unknown ones are fine."""

    def close(self, message: CloseSession) -> None:
        """Forget a session; unknown ones are fine."""

    async def forget(self, message: ForgetTenant) -> None:
        """Delete everything about a tenant and end its sessions; unknown ones are fine. Returns when nothing is left."""


@runtime_checkable
class DraftsAtOnce(Protocol):
    """What a drafter may implement too: its text sources take microseconds, less than a task of the event loop."""

    def at_once(self, message: StepReport) -> Draft | DraftFailure | None:
        """As ``Drafter.step``, where that needs no wait and ``further`` has nothing; else None, and nothing is done.

        Raises:
            Exception: drafting failed; it must not be tried again.
        """


@runtime_checkable
class DraftsTogether(Protocol):
    """What a drafter may implement beside ``DraftsAtOnce``: it drafts for all sessions of a step in one go."""

    def together(self, reports: ReportColumns) -> DraftColumns | None:
        """As ``DraftsAtOnce.at_once``, for as many of the reports as possible; nothing is done for those that are left.

        None: nothing is done for any.

        Raises:
            Exception: drafting failed; it must not be tried again.
        """


class VerifierPort(Protocol):
    """Decodes requests; what the router talks to."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        """Yield each step's tokens, then exactly one ``Finished``. Leaving the iterator cancels the request.

        Raises:
            OutriderError: instead of ``Finished``.
        """

    async def compare(self, request: GenerationRequest, plans: Sequence[Plan]) -> tuple[ReplayedAnswer, ...]:
        """What an answer would have taken under each of ``plans``, whose sources draft from tokens alone.

        Args:
            request: its ``committed`` is the whole answer.

        Raises:
            OutriderError: nothing can be said now.
        """

    async def describe(self) -> VerifierCard:
        """The model that is served, and the present load."""

    async def forget(self, tenant: str) -> None:
        """Delete everything about a tenant's requests, here and at the drafters; an absent drafter is told when it returns.

        Raises:
            OutriderError: that could not be done.
        """

    async def adapt(self, order: AdapterOrder) -> str:
        """Take a step of loading or unloading an adapter. Returns the digest of one that is loaded; else empty.

        Raises:
            OutriderError: the step cannot be taken, and nothing that is served has changed; says why.
        """
        ...

    async def reload(self, order: ReloadOrder) -> str:
        """Take a step of replacing the weights. Returns a digest of the new ones; empty if the step is ``undo``.

        Raises:
            OutriderError: the step cannot be taken, and nothing that is served has changed; says why.
        """


class VerifierLink(VerifierPort, Protocol):
    """A router's link to all verifiers of its service, which answer as one."""

    async def service_state(self) -> ServiceState:
        """The verifiers that answer now, and how many processes the service has."""
