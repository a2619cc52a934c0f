"""A body with all of its fields read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.api.http.openai.errors import Refused
from services.api.http.openai.protocol.parts import StreamOptions
from services.api.http.openai.tool_choice import ToolUse
from services.api.messages import ChatMessage, ChatOptions, Infill, RequestedSampling
from speculation.types import AcceptanceRule, Effort, Report, StructuredOutputs

Input = str | tuple[ChatMessage, ...] | tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request for ``n`` choices to each of ``inputs``.

    Attributes:
        inputs: prompts, or one conversation.
        sampling: of every choice, but for its seed.
        seed: of the first choice to an input; the next one has the next seed. None: drawn.
        default_max_tokens: tokens of an answer where neither the request nor the model's generation config says; None: what
            the context leaves.
        stream: None: the answer comes whole.
        stream_interval: tokens in an event; None: those of a decoding step.
        top_logprobs: how many log-probabilities to return besides the chosen token's; None: none at all.
        prompt_logprobs: the same of the prompt's own tokens.
        answers: there is an answer; False: only what is said of the prompt is wanted.
        truncate: keep only so many tokens of the prompt's end; -1: as many as fit; None: all.
        drops_oldest: of a conversation that is too long, leave out the oldest turns.
        truncates_end: that keeps the prompt's beginning instead.
        infill: the answers fill gaps, each behind one of ``inputs``, which are texts.
        echo: the text begins with the prompt.
        include_stop: the text ends with the stop string that ended it.
        return_token_ids: answers have token ids as well.
        tokens_as_ids: log-probabilities name tokens as "token_id:17".
        clips_length: an answer may be as long as the context leaves where the request allows a longer one.
        length_field, form_field: what the request calls the length and the form of an answer.
        text_form: a form of text that has no effect, since the answer is calls; text_form_field: what the request calls it.
        tier: the service tier is named in the answer.
        thoughts: the answer tells what the model thought before it.
        thought_limit: most tokens of a thought; None: it has no limit of its own.
        metadata: the user's own texts, by name.
        left_out: what is asked for and not there, each as it is refused where nothing may be left out.
    """

    inputs: tuple[Input, ...]
    sampling: RequestedSampling
    seed: int | None = None
    n: int = 1
    default_max_tokens: int | None = None
    model: str | None = None
    strategy: str | None = None
    num_speculative_tokens: int | None = None
    acceptance: AcceptanceRule | None = None
    effort: Effort | None = None
    sources: tuple[str, ...] | None = None
    drafter: str | None = None
    group: str = ""
    report: Report = "none"
    compare: tuple[str, ...] = ()
    chat: ChatOptions = field(default_factory=ChatOptions)
    tools: ToolUse | None = None
    prediction: str = ""
    cache_salt: str = ""
    priority: int = 0
    private: bool | None = None
    skip_special_tokens: bool = True
    stream: StreamOptions | None = None
    stream_interval: int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    answers: bool = True
    truncate: int | None = None
    drops_oldest: bool = False
    truncates_end: bool = False
    infill: Infill | None = None
    echo: bool = False
    include_stop: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    clips_length: bool = False
    length_field: str = "max_tokens"
    form_field: str = ""
    text_form: StructuredOutputs | None = None
    text_form_field: str = ""
    request_id: str | None = None
    tier: bool = False
    thoughts: bool = True
    thought_limit: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[Refused, ...] = ()
