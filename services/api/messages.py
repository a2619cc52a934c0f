"""The messages between users and the router, and the port that the public API talks to.

In ``RequestedSampling`` a value may be unset. The router completes it with the model's defaults to ``SamplingParams`` before
anything else sees the request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from services.api.model_card import ModelCard
from services.api.origins import ComparedStrategy, ReportedPass, TokenOrigin
from services.api.weights_port import WeightsPort
from speculation import limits
from speculation.errors import InvalidArgument
from speculation.messages import ServiceState
from speculation.types import (
    AcceptanceRule,
    Effort,
    FinishReason,
    Report,
    SamplingParams,
    SpeculationStats,
    StructuredOutputs,
    TokenLogprobs,
)

# Of ``ClientRequest.cache_salt``.
MAX_SALT_CHARACTERS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedSampling:
    """``SamplingParams`` as a user sends it; None or empty means unset.

    ``ignore_generation_config``: use nothing of the model's generation config but its end-of-text tokens. ``bad_words``:
    texts; the router spells them in tokens.

    Raises:
        InvalidArgument: a value is outside its range; names the field.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    ignore_generation_config: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        # What is set is checked by the class that checks all. The router knows the default of max_tokens later.
        SamplingParams(**{"max_tokens": limits.MAX_TOKENS, **self.given, "bad_words": ()})
        if len(self.bad_words) > limits.MAX_BAD_WORDS:
            raise InvalidArgument("bad_words", f"{len(self.bad_words)} words", f"at most {limits.MAX_BAD_WORDS} words")
        for word in self.bad_words:
            if not word.strip() or len(word) > limits.MAX_STOP_CHARACTERS:
                allowed = f"texts of 1 to {limits.MAX_STOP_CHARACTERS} characters, not all of them spaces"
                raise InvalidArgument("bad_words", word or "empty", allowed)

    @property
    def given(self) -> dict[str, Any]:
        """The values that are set, by name."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value not in ((), {})}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatMessage:
    """One turn of a conversation.

    ``tool_calls``: what the assistant called, as JSON text; ``tool_call_id``: which of them a tool's message answers;
    ``reasoning``: what the assistant thought before it answered.
    """

    role: str
    content: str
    name: str = ""
    tool_calls: str = ""
    tool_call_id: str = ""
    reasoning: str = ""


# Names of a template's variables that other fields of a request set: as options they are refused.
TAKEN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    """What else a chat template is given.

    ``tools`` is a JSON list, ``template_kwargs`` a JSON object; empty: none. ``continue_final_message``: the prompt ends
    within the last message, which the answer continues; then ``add_generation_prompt`` is False.
    """

    tools: str = ""
    template_kwargs: str = ""
    add_generation_prompt: bool = True
    continue_final_message: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Infill:
    """What stands around a gap that the answer fills, besides the text before it.

    Attributes:
        suffix: the text behind the gap.
        files: other files, to be read first, as (name, text).
    """

    suffix: str
    files: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class HowAsked:
    """How a user has asked: it changes no token of the answer. Traces tell of it, and the router's rules read it.

    Attributes:
        streams: the answer is sent piece by piece.
        choices: answers to the same input that were asked for.
        key: the name of the caller's key; empty: none is asked for.
        headers: those of the call, by their names in lower case, but for secrets.
        metadata: what the body says for the user's own use.
        system_prompt: the texts of a conversation's system messages.
        tools: the answer may call tools.
    """

    streams: bool = True
    choices: int = 1
    key: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    system_prompt: str = ""
    tools: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientRequest:
    """A user's request. The router fills in whatever is None.

    Attributes:
        input: text, a conversation or token ids.
        tenant, traceparent: as in ``GenerationRequest``.
        chat: how a conversation is rendered; no matter for other inputs.
        of_conversation: ``input`` are the token ids of a conversation.
        infill: ``input`` is the text before a gap, or the token ids of all that stands around it; None: it is continued.
        drafter: the name of the model that drafts; None: rules name one, or those that pay draft.
        prediction: text that the answer is expected to be; only drafted from. Empty: none.
        add_special_tokens: a text gets the special tokens that the tokenizer puts around texts.
        skip_special_tokens: the answer's text leaves out special tokens.
        request_id: the user's own id for the request; need not be unique. Empty: the router draws one.
        weight: the tenant's share of the verifier's time when it is short.
        cache_salt, priority: as in ``GenerationRequest``.
        group: the user's name for requests that draft from each other's answers while these are written; empty: none.
        siblings: what answers to one input that were asked for together have in common; empty: there is one alone.
        private: what is sent of the answer tells nothing of its drafts, and none come from others' texts; None: as the
            server does by default.
        whole: as in ``GenerationRequest``.
        how: of the user's call.
        most_tokens: longest answer where ``sampling.max_tokens`` does not say; None: the router's default alone counts.
        report: what the answer tells of its drafts; it changes nothing of the answer.
        compare: strategies of which the answer's end says what they would have made of it.
    """

    input: str | tuple[ChatMessage, ...] | tuple[int, ...]
    sampling: RequestedSampling
    model: str | None = None
    strategy: str | None = None
    sources: tuple[str, ...] | None = None
    num_speculative_tokens: int | None = None
    acceptance: AcceptanceRule | None = None
    effort: Effort | None = None
    drafter: str | None = None
    chat: ChatOptions = ChatOptions()
    of_conversation: bool = False
    infill: Infill | None = None
    prediction: str = ""
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    tenant: str | None = None
    request_id: str = ""
    traceparent: str = ""
    weight: float = 1.0
    cache_salt: str = ""
    priority: int = 0
    group: str = ""
    siblings: str = ""
    most_tokens: int | None = None
    private: bool | None = None
    whole: bool = False
    how: HowAsked = HowAsked()
    report: Report = "none"
    compare: tuple[str, ...] = ()


def is_conversation(request: ClientRequest) -> bool:
    """Whether a request's input is a conversation, or the token ids of one."""
    source = request.input
    return request.of_conversation or (bool(source) and isinstance(source, tuple) and isinstance(source[0], ChatMessage))


def system_prompt_of(source: str | tuple[ChatMessage, ...] | tuple[int, ...]) -> str:
    """The texts of a conversation's system messages, a line apart; empty: there are none, or it is no conversation."""
    if isinstance(source, str) or not source or isinstance(source[0], int):
        return ""
    told = (each for each in source if isinstance(each, ChatMessage) and each.role in ("system", "developer"))
    return "\n".join(each.content for each in told)


def continues_text(request: ClientRequest) -> bool:
    """Whether an answer's text goes on where its prompt's ends, instead of beginning a turn."""
    return not is_conversation(request) or request.chat.continue_final_message


@dataclass(frozen=True, kw_only=True, slots=True)
class TextChunk:
    """What one step added to the answer.

    ``text_ends``: for each token, the characters of the answer up to its end. Text may come later than its tokens, since
    what may begin a stop string is held back, and an incomplete character belongs to the token that completes it.
    ``incomplete``: the last token's text is not all there, since a character is not. ``origins``: one for each token; empty:
    the request does not ask for them. ``passes``: those that the tokens come from, where it asks for trees.
    ``prompt_logprobs``, ``arithmetic``, ``restarted``: as in ``speculation.messages.Progress``.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    text_ends: tuple[int, ...] = ()
    incomplete: bool = False
    origins: tuple[TokenOrigin, ...] = ()
    passes: tuple[ReportedPass, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    arithmetic: str = ""
    restarted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSpelling:
    """What a token adds to a text, in UTF-8, perhaps a part of a character; of a special token, its name."""

    data: bytes
    special: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Times in seconds since the request arrived at the router; ``queue_s`` is how long it waited to be admitted."""

    queue_s: float
    time_to_first_token_s: float
    total_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The end of an answer.

    ``stop`` is the stop string or stop token that ended it, if one did. ``cached_tokens`` of the prompt had been computed
    for an earlier request. ``predicted_tokens``: how many the request's prediction has. ``arithmetic`` as in ``ModelCard``.
    ``rule``: the name of the router's rule that chose how it was drafted; empty: none did.
    ``learnt``: why the router chose its strategy by what it has learnt; empty: it did not choose.
    """

    request_id: str
    finish_reason: FinishReason
    stop: str | int | None
    prompt_token_ids: tuple[int, ...]
    completion_tokens: int
    cached_tokens: int
    predicted_tokens: int = 0
    seed: int
    model: str
    strategy: str
    rule: str = ""
    learnt: str = ""
    arithmetic: str = ""
    stats: SpeculationStats
    timing: Timing
    comparisons: tuple[ComparedStrategy, ...] = ()


def decoding_figures(strategy: str, stats: SpeculationStats, rule: str = "", learnt: str = "") -> dict[str, Any]:
    """How an answer was decoded, by vLLM's names; with ``rule`` or ``learnt``, where one chose the strategy."""
    names = (
        "mean_acceptance_length", "draft_acceptance_rate", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens",
        "num_spec_tokens", "acceptance_histogram", "accepted_by_source", "switches", "seconds_saved",
    )  # fmt: skip
    said = {name: value for name, value in (("rule", rule), ("learnt", learnt)) if value}
    chosen = {"strategy": strategy} | said
    return chosen | {name: getattr(stats, name) for name in names}


class RouterPort(WeightsPort, Protocol):
    """Answers users' requests. The public API talks to it."""

    def generate(self, request: ClientRequest) -> AsyncGenerator[TextChunk | Completion, None]:
        """Yield the answer's pieces, then exactly one ``Completion``. Leaving the iterator cancels the request.

        Raises:
            OutriderError: instead of ``Completion``.
        """

    async def models(self, tenant: str | None = None) -> list[ModelCard]:
        """The served models, with the strategies and drafters that a tenant's requests may name; None: that all may."""

    async def forget(self, tenant: str) -> None:
        """Delete what is stored of a tenant's requests.

        Raises:
            OutriderError: that could not be done everywhere.
        """

    async def tokenize(self, request: ClientRequest) -> tuple[int, ...]:
        """The token ids of the request's input, as ``generate`` would read it.

        Raises:
            InvalidArgument: the input cannot be tokenised; names the field.
        """

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, with the names of special ones.

        Raises:
            InvalidArgument: a token is not in the model's vocabulary.
        """

    async def spell(self, token_ids: Sequence[int]) -> tuple[TokenSpelling, ...]:
        """What each token adds to a text; they are in the model's vocabulary."""

    async def tokenizer_info(self) -> Mapping[str, Any]:
        """What the model's files say of its tokenizer, as in tokenizer_config.json."""

    async def ready(self) -> bool:
        """Whether requests would be answered now."""

    async def service_state(self) -> ServiceState:
        """The verifiers that answer now, and how many processes the service has."""
