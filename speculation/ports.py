"""Who talks to whom. The load-bearing invariant: no tensor and nothing as long as the vocabulary crosses a service port.

::

    client -> Router -> VerifierPort -> DecodingLoop -> Target        (same process: tensors allowed)
                                                     -> DraftLink -> Drafter

Implementations live in ``services`` (the components), ``services/links`` (in-process and gRPC) and ``fakes`` of the tests.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from speculation.choose import LogitsPipeline

from speculation.messages import (
    ClientRequest,
    CloseSession,
    Completion,
    Draft,
    DraftFailure,
    DraftingReply,
    Finished,
    GenerationRequest,
    ModelCard,
    OpenSession,
    Progress,
    StepReport,
    TextChunk,
    VerifierCard,
)
from speculation.types import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """One request's part of a forward pass: ``chain`` tokens that follow its context, then a tree on the chain's end.

    Attributes:
        context: tokens whose keys and values the target already holds.
        tokens: the chain's tokens, then the nodes'.
        parents: one entry per node; -1 is the chain's last token.
        logits: how many of the last rows need logits.
    """

    session_id: str
    context: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...] = ()
    logits: int

    @property
    def chain(self) -> int:
        """Length of the chain."""
        return len(self.tokens) - len(self.parents)


class Target(Protocol):
    """The model and its key-value cache.

    Not thread-safe. ``open``, ``forward`` and ``keep`` are called in one and the same thread: what a library does in
    parallel gets a team of threads for every thread that asks, and two teams on the same cores halve the speed. The rest
    computes nothing, and is called between them.
    """

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

    def open(self, session_id: str, capacity: int) -> bool:
        """Reserve room for ``capacity`` rows; False if there is none now."""
        ...

    def forward(self, batch: Sequence[Rows]) -> list[torch.Tensor]:
        """One pass. Returns for each entry its logits, [``logits``, vocabulary], float32, on the CPU."""
        ...

    def keep(self, session_id: str, context: int, rows: Sequence[int]) -> None:
        """Of the pass just made keep ``rows`` (indices into ``Rows.tokens``, ascending) right behind ``context``."""
        ...

    def close(self, session_id: str) -> None:
        """Free what the session holds."""
        ...

    def pipeline(self, params: SamplingParams, prompt_length: int) -> LogitsPipeline | None:
        """How ``params`` change logits; None if they do not."""
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

    def close(self, message: CloseSession) -> None:
        """End a session."""
        ...

    async def stop(self) -> None:
        """Disconnect."""
        ...


class Drafter(Protocol):
    """Proposes trees. One call at a time for each session; different sessions may interleave."""

    async def open(self, message: OpenSession) -> Draft | DraftFailure:
        """Start a session (anew, if it exists) and draft."""
        ...

    async def step(self, message: StepReport) -> Draft | DraftFailure:
        """Learn what was committed and draft what may follow."""
        ...

    def close(self, message: CloseSession) -> None:
        """Forget a session; unknown ones are fine."""
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


class RouterPort(Protocol):
    """Answers users; what the public API talks to."""

    def generate(self, request: ClientRequest) -> AsyncGenerator[TextChunk | Completion, None]:
        """Yield the answer's pieces, then exactly one ``Completion``. Leaving the iterator cancels the request.

        Raises:
            OutriderError: instead of ``Completion``.
        """
        ...

    async def models(self) -> list[ModelCard]:
        """What is served."""
        ...

    async def ready(self) -> bool:
        """Whether requests would be answered now."""
        ...
