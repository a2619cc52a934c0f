"""speculation's messages <-> outrider.v1, the public API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from outrider.v1 import generation_pb2 as pb
from services.api.grpc.origin_messages import encode_comparisons, encode_origins, encode_passes
from services.api.messages import (
    MAX_SALT_CHARACTERS,
    ChatMessage,
    ClientRequest,
    Completion,
    HowAsked,
    RequestedSampling,
    TextChunk,
    decoding_figures,
    system_prompt_of,
)
from services.api.model_card import ModelCard
from services.links.codec.checks import one_of
from services.links.codec.same_fields import SameFields
from services.links.codec.verification import default_fields
from speculation import limits
from speculation.errors import InvalidArgument, PromptTooLong
from speculation.messages import ServedWeights
from speculation.reloads import PauseMode, RunningAnswers
from speculation.types import AcceptanceRule, Effort, FinishReason, Report, StructuredOutputs, TokenLogprobs

_REASONS = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}

# Log-probabilities of a prompt's tokens: with twenty likeliest ones each, 8 ms of work and 100 kB.
_SCORES_IN_MESSAGE = 512
# What a client is not told of is left out.
_MARKS = ("tool_format", "thoughts", "reads_thoughts", "named_roles", "special_tokens", "added_tokens", "late_system")
_OF_SERVERS = ("chats", *_MARKS, "template_options", "aliases", "infills")
_BY_HAND = ("defaults", "processors", "arithmetic", "adapters", "drafters", "weights")
_WEIGHTS = SameFields(ServedWeights, pb.ServedWeights)
_MODEL = SameFields(ModelCard, pb.Model, by_hand=(*_BY_HAND, *_OF_SERVERS))
# Fields of RequestedSampling that are copied unchanged if set.
_PLAIN_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
    "prompt_logprobs",
    "ignore_generation_config",
)


def decode_request(
    wire: pb.GenerateRequest,
    *,
    tenant: str | None,
    request_id: str = "",
    traceparent: str = "",
    headers: Mapping[str, str] = MappingProxyType({}),
) -> ClientRequest:
    """A user's request from its message and from its call's metadata (tenant, request id, trace, all that is no secret).

    Raises:
        InvalidArgument: no input, or a value outside its range; names the field.
    """
    speculation, source = wire.speculation, _decode_input(wire)
    has = speculation.HasField
    return ClientRequest(
        input=source,
        sampling=_decode_sampling(wire.sampling),
        model=wire.model if wire.HasField("model") else None,
        strategy=speculation.strategy if has("strategy") else None,
        sources=tuple(speculation.sources) or None,
        num_speculative_tokens=speculation.num_speculative_tokens if has("num_speculative_tokens") else None,
        acceptance=one_of("acceptance", speculation.acceptance, AcceptanceRule) if has("acceptance") else None,
        tenant=tenant,
        request_id=request_id,
        traceparent=traceparent,
        prediction=wire.prediction,
        cache_salt=_salt(wire.cache_salt),
        priority=wire.priority,
        private=privacy_of(wire.privacy),
        compare=tuple(speculation.compare),
        report=one_of("speculation.report", speculation.report, Report) if has("report") else "none",
        effort=one_of("speculation.effort", speculation.effort, Effort) if has("effort") else None,
        drafter=speculation.drafter if has("drafter") else None,
        group=speculation.group,
        how=HowAsked(headers=headers, system_prompt=system_prompt_of(source)),
    )


def privacy_of(asked: str) -> bool | None:
    """Whether an answer is to be private; None: the request does not say.

    Raises:
        InvalidArgument: ``asked`` is no kind of privacy.
    """
    if asked not in ("", "none", "strict"):
        raise InvalidArgument("privacy", asked, "none or strict")
    return None if not asked else asked == "strict"


def _salt(salt: str) -> str:
    if len(salt) > MAX_SALT_CHARACTERS:
        raise InvalidArgument("cache_salt", f"{len(salt)} characters", f"at most {MAX_SALT_CHARACTERS} characters")
    return salt


def _decode_input(wire: pb.GenerateRequest) -> str | tuple[ChatMessage, ...] | tuple[int, ...]:
    match wire.WhichOneof("input"):
        case "prompt":
            return wire.prompt
        case "messages":
            if not wire.messages.messages:
                raise InvalidArgument("messages", "empty", "at least one message")
            return tuple(ChatMessage(role=message.role, content=message.content) for message in wire.messages.messages)
        case "prompt_token_ids":
            if not wire.prompt_token_ids.ids:
                raise InvalidArgument("prompt_token_ids", "empty", "at least one token id")
            if (count := len(wire.prompt_token_ids.ids)) > limits.MAX_SESSION_TOKENS:
                # Before they are copied: a message has room for four times as many.
                most = f"at most {limits.MAX_SESSION_TOKENS} tokens, whatever the model"
                raise PromptTooLong("prompt_token_ids", f"{count} tokens", most)
            return tuple(wire.prompt_token_ids.ids)
        case _:
            raise InvalidArgument("input", "unset", "set: one of prompt, messages, prompt_token_ids")


def _decode_sampling(wire: pb.SamplingParams) -> RequestedSampling:
    given = {name: getattr(wire, name) for name in _PLAIN_FIELDS if wire.HasField(name)}  # type: ignore[arg-type]
    return RequestedSampling(
        **given,
        stop=tuple(wire.stop),
        stop_token_ids=_ids("stop_token_ids", wire.stop_token_ids),
        logit_bias=dict(wire.logit_bias),
        structured_outputs=_decode_structured(wire.structured_outputs) if wire.HasField("structured_outputs") else None,
        # Each once: they are looked at one by one, again and again.
        allowed_token_ids=tuple(dict.fromkeys(_ids("allowed_token_ids", wire.allowed_token_ids))),
        bad_words=tuple(wire.bad_words),
    )


def _ids(field: str, values: Sequence[int]) -> tuple[int, ...]:
    if len(values) > limits.MAX_SESSION_TOKENS:
        raise InvalidArgument(field, f"{len(values)} token ids", f"at most {limits.MAX_SESSION_TOKENS} token ids")
    return tuple(values)


def _decode_structured(wire: pb.StructuredOutputs) -> StructuredOutputs:
    match wire.WhichOneof("form"):
        case "json_object" if not wire.json_object:
            raise InvalidArgument("structured_outputs.json_object", False, "true, or unset")
        case "json_object":
            return StructuredOutputs(kind="json_object")
        case "choice":
            return StructuredOutputs(kind="choice", text=json.dumps(list(wire.choice.choices), ensure_ascii=False))
        case "json" | "regex" | "grammar" as kind:
            return StructuredOutputs(kind=kind, text=getattr(wire, kind))
        case _:
            raise InvalidArgument("structured_outputs", "empty", "one of json, json_object, regex, choice, grammar")


def decode_reload(wire: pb.ReloadRequest) -> tuple[str, RunningAnswers, float]:
    """The folder, what becomes of answers under way, and the seconds that they have.

    Raises:
        InvalidArgument: a value is wrong; names the field.
    """
    if not wire.folder:
        raise InvalidArgument("folder", "unset", "an absolute path")
    return wire.folder, one_of("running", wire.running or "finish", RunningAnswers), _within_s(wire)


def decode_pause(wire: pb.PauseRequest) -> tuple[PauseMode, float]:
    """What becomes of answers under way, and the seconds that they have to end.

    Raises:
        InvalidArgument: a value is wrong; names the field.
    """
    return one_of("mode", wire.mode or "wait", PauseMode), _within_s(wire)


def _within_s(wire: pb.ReloadRequest | pb.PauseRequest) -> float:
    within_s = wire.within_s if wire.HasField("within_s") else limits.RELOAD_S
    low, high = limits.RELOAD_WITHIN_S
    if not low <= within_s <= high:
        raise InvalidArgument("within_s", within_s, f"a number from {low:g} to {high:g}")
    return within_s


def encode_events(event: TextChunk | Completion, padding: int | None = None) -> Iterator[pb.GenerateResponse]:
    """The messages for a piece of the answer, or for its end: several where a prompt's log-probabilities need them."""
    if isinstance(event, TextChunk):
        scores = event.prompt_logprobs
        last = max(0, len(scores) - 1) // _SCORES_IN_MESSAGE * _SCORES_IN_MESSAGE
        for begin in range(0, last, _SCORES_IN_MESSAGE):
            part = scores[begin : begin + _SCORES_IN_MESSAGE]
            yield encode_event(TextChunk(text="", token_ids=(), prompt_logprobs=part), padding)
        event = replace(event, prompt_logprobs=scores[last:])
    yield encode_event(event, padding)


def encode_event(event: TextChunk | Completion, padding: int | None = None) -> pb.GenerateResponse:
    """The message for a piece of the answer, or for its end.

    Args:
        padding: make its size a multiple of so many bytes, at least 256.
    """
    if isinstance(event, TextChunk):
        chunk = pb.Chunk(
            text=event.text,
            token_ids=event.token_ids,
            logprobs=_encode_logprobs(event.logprobs),
            origins=encode_origins(event.origins),
            passes=encode_passes(event.passes),
            prompt_logprobs=_encode_logprobs(event.prompt_logprobs),
        )
        message = pb.GenerateResponse(chunk=chunk)
    else:
        message = pb.GenerateResponse(complete=_encode_completion(event))
    if padding is not None:
        # The field's tag takes a byte, and a length from 128 to 16,383 two.
        missing = -(message.ByteSize() + 3) % padding
        message.padding = bytes(missing if missing > 127 else missing + padding)
    return message


def _encode_logprobs(entries: Sequence[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            token_id=entry.token_id,
            logprob=entry.logprob,
            top=[
                pb.TokenLogprob(token_id=token, logprob=logprob)
                for token, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ],
        )
        for entry in entries
    ]


def _encode_completion(event: Completion) -> pb.Complete:
    timing = event.timing
    return pb.Complete(
        finish_reason=_REASONS[event.finish_reason],
        stop_string=event.stop if isinstance(event.stop, str) else None,
        stop_token_id=event.stop if isinstance(event.stop, int) else None,
        usage=pb.Usage(
            prompt_tokens=len(event.prompt_token_ids),
            completion_tokens=event.completion_tokens,
            cached_tokens=event.cached_tokens,
        ),
        comparisons=encode_comparisons(event.comparisons),
        speculative_decoding=pb.SpeculationMetrics(
            **decoding_figures(event.strategy, event.stats, event.rule, event.learnt)
        ),
        timing=pb.Timing(
            queue_s=timing.queue_s,
            time_to_first_token_s=timing.time_to_first_token_s,
            total_s=timing.total_s,
            tokens_per_second=event.completion_tokens / timing.total_s if timing.total_s > 0 else 0.0,
        ),
        prompt_token_ids=event.prompt_token_ids,
        seed=event.seed,
        model=event.model,
        request_id=event.request_id,
        arithmetic=event.arithmetic,
    )


def encode_models(cards: Sequence[ModelCard]) -> pb.ListModelsResponse:
    """The message that lists the served models."""
    return pb.ListModelsResponse(
        models=[
            _MODEL.encode(
                card,
                defaults=pb.SamplingDefaults(**default_fields(card.defaults)),
                processors=[pb.Processor(name=name, value=value) for name, value in card.processors],
                adapters=list(card.adapters),
                weights=_WEIGHTS.encode(card.weights),
                drafters=[pb.NameableDrafter(name=each.name, strategy=each.strategy) for each in card.drafters],
            )
            for card in cards
        ]
    )
