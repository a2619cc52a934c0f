"""Who talks to whom. The load-bearing invariant: no tensor and nothing as long as the vocabulary crosses a service port.

::

    client -> RouterPort -> VerifierPort -> DecodingLoop -> Target        (one process: services/verifier/target_port.py)
                                                         -> DraftLink -> Drafter -> Retriever

``RouterPort`` is in ``services/client_api.py``, with all that users see.

Implementations live in ``services`` (the components), ``services/links`` (in-process and gRPC) and ``fakes`` of the tests.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    pass

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
    RetrievalQuery,
    Retrieved,
    StepReport,
    VerifierCard,
)


class DraftReceiver(Protocol):
    """The verifier's side of a draft link. Called on the loop's own event loop; must not block."""

    def on_reply(self, reply: DraftingReply) -> None:
        """A draft, or the word that there will be none."""

    def on_connected(self) -> None:
        """The drafter is there, possibly a new one that knows no session."""


class DraftLink(Protocol):
    """The way to a drafter. Sending never blocks and never raises: a drafter can cost speed, nothing else."""

    @property
    def connected(self) -> bool:
        """Whether waiting for a draft makes sense."""

    async def start(self, receiver: DraftReceiver) -> None:
        """Connect, and keep connected until ``stop``."""

    def open(self, message: OpenSession) -> None:
        """Start a session."""

    def step(self, message: StepReport) -> None:
        """Report a step."""

    def features(self, message: FeatureChunk) -> None:
        """Send hidden states. They are the first thing to be dropped where a drafter does not keep up."""

    def close(self, message: CloseSession) -> None:
        """End a session."""

    def forget(self, message: ForgetTenant) -> None:
        """Delete what is remembered of a tenant. ``Forgotten`` comes back when that is done."""

    async def stop(self) -> None:
        """Disconnect."""


class Retriever(Protocol):
    """Looks up what followed a text's ending in a corpus. Many queries may be under way at once."""

    async def retrieve(self, query: RetrievalQuery) -> Retrieved:
        """Look up.

        Raises:
            OutriderError: there is no answer now; a drafter goes on without.
        """


class Drafter(Protocol):
    """Proposes trees. One call at a time for each session, in order; those of different sessions side by side."""

    async def open(self, message: OpenSession) -> Draft | DraftFailure | None:
        """Start a session (anew, if it exists) and draft. None: whatever there is comes from ``further``."""

    async def step(self, message: StepReport) -> Draft | DraftFailure | None:
        """Learn what was committed and draft what may follow. None: see ``open``."""

    def further(self, session_id: str) -> AsyncIterator[Draft]:
        """What is ready later than the answer to the last call: other groups' drafts, and drafts made ahead.

        Left as soon as the session's next call is there. Nothing for unknown sessions.
        """

    def features(self, message: FeatureChunk) -> None:
        """Hidden states of a session; unknown ones are fine."""

    def close(self, message: CloseSession) -> None:
        """Forget a session; unknown ones are fine."""

    async def forget(self, message: ForgetTenant) -> None:
        """Delete what is remembered of a tenant, and end its sessions; unknown ones are fine.

        Returns when nothing is left.
        """


class VerifierPort(Protocol):
    """Decodes requests; what the router talks to."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        """Yield each step's tokens, then exactly one ``Finished``. Leaving the iterator cancels the request.

        Raises:
            OutriderError: instead of ``Finished``.
        """

    async def describe(self) -> VerifierCard:
        """What is served, and the load."""

    async def forget(self, tenant: str) -> None:
        """Delete what is remembered of a tenant's requests, here and at the drafter; one that is away is told on its return.

        Raises:
            OutriderError: that could not be done.
        """
