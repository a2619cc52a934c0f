"""What the components say to each other: one dataclass per message, in the order of a request's life."""

from __future__ import annotations

from dataclasses import dataclass, field

from speculation.types import (
    EMPTY_TREE,
    Features,
    FinishReason,
    Observation,
    Plan,
    SamplingDefaults,
    SamplingParams,
    TokenLogprobs,
    TokenTree,
)


def log_name(name: str, traceparent: str) -> str:
    """The name of a request or session in logs, with its trace, so that a search for either finds the line."""
    return f"{name} (trace {traceparent})" if traceparent else name


# --- router -> verifier -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """A validated request in token ids, with its plan.

    ``request_id`` is unique among live requests, and begins with the id that the user knows. ``committed`` is the part of
    the answer that an earlier verifier has already given: generation continues behind it, with the same tokens as without a
    migration. The KV cache and what is learnt are shared among requests of ``tenant``; None: with nobody. ``traceparent`` as
    in W3C Trace Context; empty: none.
    """

    request_id: str
    prompt: tuple[int, ...]
    committed: tuple[int, ...] = ()
    sampling: SamplingParams
    plan: Plan
    tenant: str | None = None
    traceparent: str = ""


# --- verifier -> router -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One step's tokens.

    ``num_drafted`` nodes were checked; ``accepted_sources`` names the source of each accepted one. ``queue_s``: seconds that
    the request waited at the verifier before its first pass.
    """

    token_ids: tuple[int, ...]
    queue_s: float = 0.0
    num_drafted: int = 0
    accepted_sources: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The one terminal message of a generation."""

    reason: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifierCard:
    """What a verifier serves and how busy it is; see ``client_api.ModelCard`` for the rest."""

    model: str
    max_model_len: int
    vocab_size: int
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    bit_exact: bool
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    processors: tuple[tuple[str, str], ...] = ()


# --- verifier -> drafter ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenSession:
    """Starts a session, or restarts it with everything committed so far (late join).

    ``tenant`` and ``traceparent`` as in ``GenerationRequest``.
    """

    session_id: str
    tokens: tuple[int, ...]
    prompt_length: int
    sources: tuple[str, ...]
    max_nodes: int
    temperature: float = 0.0
    tenant: str | None = None
    traceparent: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one step committed; ``length`` and ``prefix_hash`` describe the prefix after it.

    At the present load, nodes accepted with less than ``min_probability`` are not worth their rows: a source that knows
    probabilities need not draft them.
    """

    session_id: str
    committed: tuple[int, ...]
    length: int
    prefix_hash: int
    accepted_path: tuple[int, ...]
    max_nodes: int
    min_probability: float = 0.0
    observation: Observation | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseSession:
    """Ends a session; the drafter forgets it."""

    session_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgetTenant:
    """Asks to forget all of a tenant's requests, live ones included; ``Forgotten`` answers with the same ``forget_id``."""

    tenant: str
    forget_id: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureChunk:
    """Hidden states of a session's committed positions: those of its prompt chunks, or all of them for a late drafter.

    Those of a step come with its report. A position that is never sent is missing; sources must mask it.
    """

    session_id: str
    features: Features


SessionCall = OpenSession | StepReport | CloseSession
DraftingCall = SessionCall | FeatureChunk | ForgetTenant


# --- drafter -> retrieval -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalQuery:
    """Asks what followed ``suffix``, the end of a text (oldest token first), in the corpus.

    At most ``max_continuations`` of at most ``max_length`` tokens are wanted. With ``state`` (one row), the query asks what
    followed the nearest hidden states instead; ``suffix`` then ends in the token that was chosen from ``state``.
    ``session_id`` and ``traceparent`` are for the log.
    """

    suffix: tuple[int, ...]
    max_continuations: int
    max_length: int
    state: Features | None = None
    session_id: str = ""
    traceparent: str = ""


# --- retrieval -> drafter -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """What followed the last ``match_length`` tokens of a query in the corpus, ``count`` times."""

    tokens: tuple[int, ...]
    count: int
    match_length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Retrieved:
    """The answer of index version ``index_version``; empty if nothing was found."""

    continuations: tuple[Continuation, ...] = ()
    index_version: str = ""


# --- drafter -> verifier ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A tree for the step after ``assumed``, tokens that follow the prefix (``base_length``, ``base_hash``).

    ``drafting_s``: seconds that the drafter took for it. Sources that finish at different times draft in different groups:
    a draft replaces an earlier one of its ``group`` for the same prefix, and is merged with those of other groups.
    ``more``: another group's draft for this prefix is under way.
    """

    session_id: str
    base_length: int
    base_hash: int
    assumed: tuple[int, ...] = ()
    tree: TokenTree = EMPTY_TREE
    drafting_s: float = field(default=0.0, compare=False)
    group: str = ""
    more: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftFailure:
    """The drafter could not draft for this session; the verifier goes on without. ``reopen``: reopening it would help."""

    session_id: str
    reason: str
    reopen: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Forgotten:
    """Answers ``ForgetTenant``: this drafter keeps nothing of the tenant any more."""

    forget_id: int


DraftingReply = Draft | DraftFailure | Forgotten
