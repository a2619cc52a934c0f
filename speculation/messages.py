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
    """How logs call a request or its session: so that whoever looks for its id or its trace finds the line."""
    return f"{name} (trace {traceparent})" if traceparent else name


# --- router -> verifier -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """A validated request in token ids, with its plan.

    ``request_id`` is no other live request's, and begins with what the user knows the request by. ``committed`` is what an
    earlier verifier has said already: the answer goes on behind it, as if nothing had happened. What is computed and learnt
    is shared with other requests of ``tenant``; None: with nobody. ``traceparent`` is of W3C Trace Context; empty: none.
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

    ``num_drafted`` nodes were checked; ``accepted_sources`` says who proposed each accepted one. ``queue_s`` is how long the
    request waited at the verifier before its first pass.
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
    """Starts a session, or starts it anew with all that is committed so far (late join).

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

    Nodes that are accepted with less than ``min_probability`` are not worth their rows at the present load: a source that
    knows probabilities need not draft them.
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
    """Everything that is remembered of a tenant's requests is to be forgotten, those under way included.

    ``Forgotten`` answers with the same ``forget_id``.
    """

    tenant: str
    forget_id: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureChunk:
    """Hidden states of committed positions of a session: its prompt's, chunk by chunk, or all again for a late drafter.

    Those of a step come with its report. Positions that are never told are missing: nobody guesses them.
    """

    session_id: str
    features: Features


SessionCall = OpenSession | StepReport | CloseSession
DraftingCall = SessionCall | FeatureChunk | ForgetTenant


# --- drafter -> retrieval -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalQuery:
    """The end of a text, oldest token first; at most ``max_continuations`` of at most ``max_length`` tokens are wanted.

    With ``state``, one row, what followed the nearest hidden states is wanted instead of what followed the same tokens.
    ``suffix`` then ends in the token that was chosen from it. ``session_id`` and ``traceparent`` say who asks: for the log.
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
    """The answer of the index of version ``index_version``; no continuation where it knows none."""

    continuations: tuple[Continuation, ...] = ()
    index_version: str = ""


# --- drafter -> verifier ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A tree for the step that follows ``assumed``, which itself follows the prefix (``base_length``, ``base_hash``).

    ``drafting_s`` is what it took the drafter to make it. Sources that are ready at their own time draft in a ``group`` of
    their own: a draft replaces an earlier one of its group for the same prefix, and stands beside those of other groups.
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
    """The drafter could not draft for this session; the verifier goes on without. ``reopen``: opening it anew would help."""

    session_id: str
    reason: str
    reopen: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Forgotten:
    """Answers ``ForgetTenant``: nothing of the tenant is left at this drafter."""

    forget_id: int


DraftingReply = Draft | DraftFailure | Forgotten
