"""What the components say to each other: one dataclass per message, in the order of a request's life."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from speculation.held_models import HeldModel
from speculation.records import quickly_made
from speculation.reloads import PauseMode
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

# --- router -> verifier -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """A validated request in token ids, with its plan.

    ``request_id`` is unique among live requests, and begins with the id that the user knows. ``committed`` is the part of
    the answer that an earlier verifier has already given: generation continues behind it, with the same tokens as without a
    migration. The KV cache and what is learnt are shared among requests of ``tenant``; None: with nobody. ``traceparent`` as
    in W3C Trace Context; empty: none. ``prediction``: the expected answer; only drafted from. ``weight``: the tenant's share
    of the time. ``cache_salt``: what else must be equal to share. ``priority``: the tenant's lower ones are served first.
    ``arithmetic``: that of the verifiers that chose what is committed; empty: not known. ``whole``: nobody sees any of the
    answer before its end, so that it may begin once more where weights are replaced. ``group``: what answers that are
    written beside this one to the same prompt have, too; empty: none are. ``tokenizer``: a digest of the one that the
    prompt's tokens are of; empty: not told, since all components are of one service. ``adapter``: the name of the LoRA
    adapter that the answer is computed with; empty: none.
    """

    request_id: str
    prompt: tuple[int, ...]
    committed: tuple[int, ...] = ()
    sampling: SamplingParams
    plan: Plan
    tenant: str | None = None
    traceparent: str = ""
    prediction: tuple[int, ...] = ()
    weight: float = 1.0
    cache_salt: str = ""
    priority: int = 0
    arithmetic: str = ""
    whole: bool = False
    group: str = ""
    tokenizer: str = ""
    adapter: str = ""


# --- verifier -> router -------------------------------------------------------------------------------------------


@quickly_made
@dataclass(frozen=True, kw_only=True, slots=True)
class PassReport:
    """What a pass checked of one request's drafts, for people.

    Attributes:
        tree: the nodes that drafters proposed, without probes: the checked ones first, then those that the budget dropped.
        checked: how many nodes were checked.
        accepted_path: nodes of the tree.
        seconds: from the pass's beginning until its tokens were known.
        waited_s: seconds for which the pass waited for drafts before.
        requests: how many requests shared the pass.
    """

    tree: TokenTree = EMPTY_TREE
    checked: int = 0
    accepted_path: tuple[int, ...] = ()
    seconds: float
    waited_s: float
    requests: int


@quickly_made
@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One step's tokens.

    ``num_drafted`` nodes were checked; ``accepted_sources`` names the source of each accepted one. ``queue_s``: seconds
    before its first pass. ``cached_tokens`` of its prompt had been computed before. ``switches``: sources left out, and why.
    ``saved_s``: seconds by which the step's tokens came sooner than by plain decoding of the same requests; may be negative.
    ``report``: where the plan asks for it.
    ``prompt_logprobs``: of the prompt's tokens but its first, with the answer's first token where they are wanted.
    ``arithmetic``: the verifier's, see ``services.api.model_card.ModelCard``; told with its first tokens of an answer.
    ``restarted``: the answer begins once more, with other weights; all that was told of it before is void.
    """

    token_ids: tuple[int, ...]
    queue_s: float = 0.0
    cached_tokens: int = 0
    num_drafted: int = 0
    accepted_sources: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    switches: tuple[str, ...] = ()
    saved_s: float = field(default=0.0, compare=False)
    arithmetic: str = field(default="", compare=False)
    restarted: bool = False
    report: PassReport | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedAnswer:
    """What an answer would have taken under another plan. None: not known.

    ``num_passes``: passes that bring tokens, the prompt's included. ``seconds``: of all passes behind that one and of their
    drafts, by the measured costs of a request that decodes alone.
    """

    num_passes: int | None
    seconds: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The one terminal message of a generation."""

    reason: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingCounts:
    """What a verifier has counted since its start, over all requests.

    Attributes:
        tokens: of answers; ``passes``: those that brought them, each counted once for every request that got tokens from it.
        prompt_tokens: of admitted requests; ``cached_prompt_tokens``: those of them that had been computed before.
        drafted_by_source: drafted tokens that were checked; ``accepted_by_source``: those of them that were accepted.
        saved_s: sum over answers of the seconds by which drafting made them come sooner; negative: later.
    """

    tokens: int = 0
    passes: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    drafted_by_source: Mapping[str, int] = field(default_factory=dict)
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)
    saved_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedWeights:
    """Which numbers a served model has: of all models that a checkpoint may stand for, answers are exact for this one.

    Attributes:
        stored: how its files store them: a quantised format, or types of numbers or blocks; empty: not known.
        multiplied: as what linear layers multiply by them, such as Q4_0 or float32; that of most of them first.
        kernels: what multiplies: native (Outrider's own), onednn or torch; on a GPU triton, cublaslt or torch.
        rounded_inputs: how layers round what enters them; empty: they do not.
        rounded_cache: how keys and values are rounded when they are stored; empty: they are not.
    """

    stored: str = ""
    multiplied: tuple[str, ...] = ()
    kernels: str = ""
    rounded_inputs: str = ""
    rounded_cache: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifierCard:
    """What a verifier serves and how busy it is; see ``services.api.model_card.ModelCard`` for the rest.

    ``drafters``: whether it is connected to them, by their names. ``paused``: how decoding was paused; None: it is not.
    ``pause_id``: which pause that is, as its order names it. ``held``: the models that its drafters hold, where one outside
    of the service has told; None: those of the settings.
    """

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
    arithmetic: str = ""
    counts: DecodingCounts = DecodingCounts()
    drafters: Mapping[str, bool] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    paused: PauseMode | None = None
    pause_id: str = ""
    weights: ServedWeights = ServedWeights()
    held: tuple[HeldModel, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceState:
    """A service as one of its routers sees it.

    Attributes:
        verifiers: those that answer.
        components: how many processes there are, by component (verifier, drafter, ...) and state (running, starting, ...).
    """

    verifiers: tuple[VerifierCard, ...] = ()
    components: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


# --- verifier -> drafter ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftNoise:
    """The noise of a request's choices, and how its distribution is cut; fields as in ``SamplingParams``.

    A source with a distribution q finds the likeliest choices by adding the very same noise to log q.
    """

    seed: int
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenSession:
    """Starts a session, or restarts it with everything committed so far (late join).

    ``tenant``, ``traceparent``, ``prediction``, ``group`` and ``adapter`` as in ``GenerationRequest``. ``noise`` is told to
    trusted drafters of requests that are sampled under ``acceptance: walk``. ``sampled``: the rule is rejection at a
    temperature above 0; sources that can should draw chains from q, and report it (``TokenTree.proposals``).
    """

    session_id: str
    tokens: tuple[int, ...]
    prompt_length: int
    sources: tuple[str, ...]
    max_nodes: int
    temperature: float = 0.0
    noise: DraftNoise | None = None
    sampled: bool = False
    tenant: str | None = None
    traceparent: str = ""
    prediction: tuple[int, ...] = ()
    group: str = ""
    adapter: str = ""


@quickly_made
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RecalledAnswers:
    """A tenant's answers that other drafters kept since an earlier call, oldest first.

    ``generation`` is another one each time that the tenant is forgotten. The next call goes on after ``last``; ``more``: it
    would bring something now.
    """

    generation: int
    answers: tuple[tuple[int, ...], ...]
    last: str
    more: bool = False


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


@quickly_made
@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A tree for the step after ``assumed``, tokens that follow the prefix (``base_length``, ``base_hash``).

    ``drafting_s``: seconds that it took. It replaces an earlier one of its ``group`` for the same prefix, and is merged with
    those of others. ``more``: another group's is under way. ``unready``: its group cannot draft yet, whatever it is worth.
    """

    session_id: str
    base_length: int
    base_hash: int
    assumed: tuple[int, ...] = ()
    tree: TokenTree = EMPTY_TREE
    drafting_s: float = field(default=0.0, compare=False)
    group: str = ""
    more: bool = False
    unready: bool = False


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
