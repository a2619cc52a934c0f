"""Who talks to whom. The load-bearing invariant: no tensor and nothing as long as the vocabulary crosses a service port.

::

    client -> RouterPort -> VerifierPort -> DecodingLoop -> Target        (same process: tensors allowed)
                                                         -> DraftLink -> Drafter -> Retriever

``RouterPort`` is in ``services/client_api.py``, with all that users see.

Implementations live in ``services`` (the components), ``services/links`` (in-process and gRPC) and ``fakes`` of the tests.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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
from speculation.types import Features, SamplingParams, TokenLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """One request's part of a forward pass: ``chain`` tokens that follow its context, then a tree on the chain's end.

    Attributes:
        context: tokens whose keys and values the target already holds.
        tokens: the chain's tokens, then the nodes'.
        parents: one entry per node; -1 is the chain's last token.
        logits: how many of the last rows the target chooses after: none, or the chain's last one and all nodes.
        top_k: how many of the likeliest ids after each of these rows are wanted.
        distributions: whether distributions are wanted after these rows, in place of choices.
        layers: whose hidden states ``Target.features`` will be asked for, of any of these rows; as in ``Features``.
    """

    session_id: str
    context: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...] = ()
    logits: int
    top_k: int = 0
    distributions: bool = False
    layers: tuple[int, ...] = ()

    @property
    def chain(self) -> int:
        """Length of the chain."""
        return len(self.tokens) - len(self.parents)


NOT_CHOSEN = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a request's tokens are chosen; ``prompt_length`` says where its answer begins."""

    params: SamplingParams
    prompt_length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a pass brought for one request. Row 0 is the chain's last one, row i + 1 the tree's node i.

    Attributes:
        choices: the target's own token after each row; ``NOT_CHOSEN`` where its choices before lead elsewhere, where
            ``error`` says why there is none, and for all rows of a request that wants distributions.
        top_ids: the likeliest ids after each row, as many as were asked for, likeliest first.
        logprobs: log-probabilities of a token after a row, where the request's parameters ask for them.
        distribution: p after a row, [vocabulary], float64, with sum 1, where it was asked for.
        error: why a row that the choices lead to has none.

    Both functions may be called until the request's rows are kept.
    """

    choices: tuple[int, ...] = ()
    top_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: Callable[[int, int], TokenLogprobs] | None = None
    distribution: Callable[[int], NDArray[np.float64]] | None = None
    error: Exception | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """What a request begins with, and whose it is: requests of one tenant share what is computed of it; None: of nobody."""

    tokens: Sequence[int]
    tenant: str | None = None


class Target(Protocol):
    """The model and its key-value cache.

    Not thread-safe. What computes (``begin``, ``finish``, ``keep``, ``recover``) is called in one and the same thread: what
    a library does in parallel gets a team of threads for every thread that asks, and two teams on the same cores halve the
    speed. The rest computes nothing, and is called between them.
    """

    @property
    def depth(self) -> int:
        """How many passes should be under way at a time: one for each stage."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The model's own end-of-text tokens."""
        ...

    @property
    def choosing_s(self) -> float:
        """Seconds of the last ``finish`` that went into choosing."""
        ...

    def open(
        self, session_id: str, rows: int, prefix: Prefix | None = None, *, sampling: Sampling | None = None, spare: int = 0
    ) -> bool:
        """Make room for ``rows`` rows; False if there is none now, or not with ``spare`` rows left over for others.

        Without a prefix nothing is shared. Without ``sampling`` the likeliest token is chosen.
        """
        ...

    def computed(self, session_id: str) -> int:
        """How many of the session's tokens need not be computed any more."""
        ...

    def grow(self, session_id: str, rows: int) -> bool:
        """Make room for ``rows`` rows in all; False if there is none now."""
        ...

    def begin(self, batch: Sequence[Rows]) -> None:
        """Start a pass. A session has its rows in one pass at a time."""
        ...

    def finish(self) -> list[Outcome]:
        """End the oldest pass. Returns what it brought for each entry.

        Raises:
            TargetLost: nothing can be done before ``recover``.
        """
        ...

    def check_layers(self, layers: Sequence[int]) -> None:
        """Check that hidden states of these layers can be had; see ``Rows.layers``.

        Raises:
            InvalidArgument: of one they cannot; says which, and what is allowed.
        """
        ...

    def features(self, session_id: str, rows: Sequence[int]) -> Features:
        """Hidden states of ``Rows.layers``, side by side, in the session's pass just finished.

        Args:
            rows: indices into its tokens, of positions that follow each other: of its chain, then of an accepted path.
        """
        ...

    def keep(self, session_id: str, context: int, rows: Sequence[int]) -> None:
        """Of the session's pass, just finished, keep ``rows`` (indices into its tokens, ascending) behind ``context``."""
        ...

    def close(self, session_id: str) -> None:
        """Free what the session holds. Its rows are in no pass."""
        ...

    def forget(self, tenant: str) -> None:
        """Share nothing any more of what has been computed for a tenant."""
        ...

    def recover(self) -> None:
        """Build everything anew after ``TargetLost``, without any session."""
        ...

    def shutdown(self) -> None:
        """Let go of everything beyond this process."""
        ...


class DraftReceiver(Protocol):
    """The verifier's side of a draft link. Called on the loop's own event loop; must not block."""

    def on_reply(self, reply: DraftingReply) -> None:
        """A draft, or the word that there will be none."""
        ...

    def on_connected(self) -> None:
        """The drafter is there, possibly a new one that knows no session."""
        ...


class DraftLink(Protocol):
    """The way to a drafter. Sending never blocks and never raises: a drafter can cost speed, nothing else."""

    @property
    def connected(self) -> bool:
        """Whether waiting for a draft makes sense."""
        ...

    async def start(self, receiver: DraftReceiver) -> None:
        """Connect, and keep connected until ``stop``."""
        ...

    def open(self, message: OpenSession) -> None:
        """Start a session."""
        ...

    def step(self, message: StepReport) -> None:
        """Report a step."""
        ...

    def features(self, message: FeatureChunk) -> None:
        """Send hidden states. They are the first thing to be dropped where a drafter does not keep up."""
        ...

    def close(self, message: CloseSession) -> None:
        """End a session."""
        ...

    def forget(self, message: ForgetTenant) -> None:
        """Delete what is remembered of a tenant. ``Forgotten`` comes back when that is done."""
        ...

    async def stop(self) -> None:
        """Disconnect."""
        ...


class Retriever(Protocol):
    """Looks up what followed a text's ending in a corpus. Many queries may be under way at once."""

    async def retrieve(self, query: RetrievalQuery) -> Retrieved:
        """Look up.

        Raises:
            OutriderError: there is no answer now; a drafter goes on without.
        """
        ...


class Drafter(Protocol):
    """Proposes trees. One call at a time for each session, in order; those of different sessions side by side."""

    async def open(self, message: OpenSession) -> Draft | DraftFailure | None:
        """Start a session (anew, if it exists) and draft. None: whatever there is comes from ``further``."""
        ...

    async def step(self, message: StepReport) -> Draft | DraftFailure | None:
        """Learn what was committed and draft what may follow. None: see ``open``."""
        ...

    def further(self, session_id: str) -> AsyncIterator[Draft]:
        """What is ready later than the answer to the last call: other groups' drafts, and drafts made ahead.

        Left as soon as the session's next call is there. Nothing for unknown sessions.
        """
        ...

    def features(self, message: FeatureChunk) -> None:
        """Hidden states of a session; unknown ones are fine."""
        ...

    def close(self, message: CloseSession) -> None:
        """Forget a session; unknown ones are fine."""
        ...

    async def forget(self, message: ForgetTenant) -> None:
        """Delete what is remembered of a tenant, and end its sessions; unknown ones are fine.

        Returns when nothing is left.
        """
        ...


class VerifierPort(Protocol):
    """Decodes requests; what the router talks to."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        """Yield each step's tokens, then exactly one ``Finished``. Leaving the iterator cancels the request.

        Raises:
            OutriderError: instead of ``Finished``.
        """
        ...

    async def describe(self) -> VerifierCard:
        """What is served, and the load."""
        ...

    async def forget(self, tenant: str) -> None:
        """Delete what is remembered of a tenant's requests, here and at the drafter; one that is away is told on its return.

        Raises:
            OutriderError: that could not be done.
        """
        ...
