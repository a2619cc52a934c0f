"""Keyword arguments to protobuf request, and protobuf response to results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypedDict

from google.protobuf.descriptor import FieldDescriptor

from outrider._transport import MAX_BYTES, wrong
from outrider.errors import InvalidArgument
from outrider.types import (
    Chunk,
    Comparison,
    DroppedNodes,
    Generation,
    Logprob,
    Model,
    NameableDrafter,
    PassReport,
    ServedWeights,
    SpeculativeDecoding,
    Timing,
    TokenLogprobs,
    TokenOrigin,
    Usage,
)
from outrider.v1 import generation_pb2 as pb


class Message(TypedDict):
    """One turn of a conversation. ``role``: system, user, assistant, or another one that the model's chat template knows."""

    role: str
    content: str


# Those that Outrider has, as ``Model.strategies`` lists them; a server may have fewer.
Strategy = Literal[
    "autoregressive",
    "prompt_lookup",
    "suffix",
    "recycling",
    "blend",
    "auto",
    "anpd",
    "lookahead",
    "spectra_core",
    "spectra",
    "spectra_retrieval",
    "rest",
    "semantic",
    "draft_model",
    "eagle",
    "eagle3",
    "fspad",
    "streaming",
    "medusa",
    "mtp",
    "peagle",
    "dflash",
    "uno",
]
Acceptance = Literal["walk", "rejection"]
Effort = Literal["paper", "measured"]
Report = Literal["none", "sources", "trees"]
Privacy = Literal["none", "strict"]

_FINISH_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class StructuredOutputs(TypedDict, total=False):
    """The form that an answer must have: exactly one of these, as in vLLM.

    ``json``: a JSON schema, as JSON text or as what Python makes of it. ``json_object``: True for any JSON object.
    ``regex``: an expression that the whole answer matches. ``choice``: one of these texts. ``grammar``: a Lark grammar.
    """

    json: str | Mapping[str, Any] | bool
    json_object: bool
    regex: str
    choice: Sequence[str]
    grammar: str


class Options(TypedDict, total=False):
    """What ``generate`` and ``stream`` take besides their input; ``Client.generate`` says what each option means."""

    model: str | None
    strategy: Strategy | None
    sources: str | Sequence[str] | None
    num_speculative_tokens: int | None
    acceptance: Acceptance | None
    effort: Effort | None
    drafter: str | None
    group: str | None
    report: Report | None
    compare: str | Sequence[str] | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    prompt_logprobs: int | None
    ignore_generation_config: bool | None
    structured_outputs: StructuredOutputs | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    prediction: str | None
    cache_salt: str | None
    priority: int | None
    privacy: Privacy | None


_SPECULATION = (
    "strategy", "sources", "num_speculative_tokens", "acceptance", "effort", "drafter", "group", "report", "compare",
)  # fmt: skip


def build_request(
    prompt: str | None, messages: Sequence[Message] | None, token_ids: Sequence[int] | None, options: Options
) -> pb.GenerateRequest:
    """The request for one call.

    Raises:
        InvalidArgument: not exactly one input, an unknown option, a value of the wrong type or outside the wire's range, or
            a request that is too large.
    """
    given = [
        name for name, value in (("prompt", prompt), ("messages", messages), ("token_ids", token_ids)) if value is not None
    ]
    if len(given) != 1:
        raise InvalidArgument(f"give exactly one of prompt, messages, token_ids; got {', '.join(given) or 'none'}", "prompt")
    request = pb.GenerateRequest()
    if prompt is not None:
        _set(request, "prompt", prompt)
    elif messages is not None:
        request.messages.SetInParent()
        for index, message in enumerate(messages):
            _add_message(request, index, message)
    elif token_ids is not None:
        request.prompt_token_ids.SetInParent()
        _set(request.prompt_token_ids, "ids", token_ids, "token_ids")
    for name, value in options.items():
        if name not in Options.__annotations__:
            raise _unknown(name)
        if value is not None:
            _set_option(request, name, value)
    if request.ByteSize() > MAX_BYTES:
        size, limit = f"{request.ByteSize()} bytes", f"at most {MAX_BYTES} bytes"
        raise InvalidArgument(f"the request is {size}: must be {limit}", "request", size, limit)
    return request


def _unknown(name: str) -> InvalidArgument:
    known = sorted(Options.__annotations__)
    near = get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return InvalidArgument(f"unknown option {name}{hint}; known: {', '.join(known)}", name)


def _add_message(request: pb.GenerateRequest, index: int, message: Message) -> None:
    if set(message) != {"role", "content"}:
        text = f"messages[{index}] has keys {sorted(message)}: must have role and content"
        raise InvalidArgument(text, f"messages[{index}]", str(sorted(message)), "role and content")
    wire = request.messages.messages.add()
    _set(wire, "role", message["role"], f"messages[{index}].role")
    _set(wire, "content", message["content"], f"messages[{index}].content")


def _set_option(request: pb.GenerateRequest, name: str, value: Any) -> None:
    if name in ("model", "prediction", "cache_salt", "priority", "privacy"):
        _set(request, name, value)
    elif name in _SPECULATION:
        _set(request.speculation, name, [value] if name in ("sources", "compare") and isinstance(value, str) else value)
    elif name == "structured_outputs":
        _set_form(request.sampling.structured_outputs, value)
    elif name in ("stop", "bad_words"):
        _set(request.sampling, name, [value] if isinstance(value, str) else value)
    else:
        _set(request.sampling, name, value)


def _set_form(wire: pb.StructuredOutputs, value: Any) -> None:
    name, known = "structured_outputs", tuple(StructuredOutputs.__annotations__)
    given = dict(value) if isinstance(value, Mapping) else {}
    if len(given) != 1 or next(iter(given)) not in known:
        allowed = f"a mapping with exactly one of {', '.join(known)}"
        raise wrong(name, value, allowed)
    ((kind, form),) = given.items()
    if kind == "choice":
        wire.choice.SetInParent()
        _set(wire.choice, "choices", [form] if isinstance(form, str) else form, f"{name}.choice")
    elif kind == "json" and not isinstance(form, str):
        try:
            wire.json = json.dumps(form, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            allowed = "a JSON schema, as text or as what Python makes of it"
            raise wrong(f"{name}.json", form, allowed) from error
    else:
        _set(wire, kind, form, f"{name}.{kind}")


_KINDS = {
    FieldDescriptor.CPPTYPE_INT32: f"a whole number from {-(2**31)} to {2**31 - 1}",
    FieldDescriptor.CPPTYPE_UINT32: f"a whole number from 0 to {2**32 - 1}",
    FieldDescriptor.CPPTYPE_INT64: f"a whole number from {-(2**63)} to {2**63 - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"a whole number from 0 to {2**64 - 1}",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_STRING: "text that can be written in UTF-8",
    FieldDescriptor.CPPTYPE_ENUM: "a name that the API knows",
}


def _set(message: Any, name: str, value: Any, label: str | None = None) -> None:
    try:
        if isinstance(value, Mapping):
            getattr(message, name).update(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise wrong(label or name, value, _allowed(message, name)) from error


def _allowed(message: Any, name: str) -> str:
    """What the wire takes; the server may allow less."""
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return "a mapping of token ids to numbers"
    kind = _KINDS.get(field.cpp_type, "another type")
    return f"a list, each {kind}" if field.is_repeated else kind


def read_chunk(wire: pb.Chunk) -> Chunk:
    """A piece of an answer."""
    return Chunk(
        text=wire.text,
        token_ids=tuple(wire.token_ids),
        logprobs=_read_logprobs(wire.logprobs),
        origins=tuple(TokenOrigin(source=each.source, text_length=each.text_length) for each in wire.origins),
        passes=tuple(_read_pass(each) for each in wire.passes),
        prompt_logprobs=_read_logprobs(wire.prompt_logprobs),
    )


def _read_logprobs(wire: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            token_id=entry.token_id,
            logprob=entry.logprob,
            top=tuple(Logprob(token_id=top.token_id, logprob=top.logprob) for top in entry.top),
        )
        for entry in wire
    )


def _read_pass(wire: pb.PassReport) -> PassReport:
    return PassReport(
        **_read_nodes(wire),
        accepted=tuple(wire.accepted),
        committed=wire.committed,
        dropped=DroppedNodes(**_read_nodes(wire.dropped)),
        pass_s=wire.pass_s,
        wait_s=wire.wait_s,
        requests=wire.requests,
    )


def _read_nodes(wire: pb.PassReport | pb.DroppedNodes) -> dict[str, Any]:
    return {name: tuple(getattr(wire, name)) for name in DroppedNodes.__dataclass_fields__}


def join(chunks: Sequence[Chunk], end: pb.Complete) -> Generation:
    """The whole answer."""
    stop: str | int | None = None
    if end.HasField("stop_string"):
        stop = end.stop_string
    elif end.HasField("stop_token_id"):
        stop = end.stop_token_id
    spec, timing = end.speculative_decoding, end.timing
    text = "".join(chunk.text for chunk in chunks)
    return Generation(
        text=text,
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        finish_reason=_FINISH_REASONS.get(end.finish_reason, "unknown"),
        stop=stop,
        usage=Usage(
            prompt_tokens=end.usage.prompt_tokens,
            completion_tokens=end.usage.completion_tokens,
            cached_tokens=end.usage.cached_tokens,
        ),
        speculative_decoding=SpeculativeDecoding(
            strategy=spec.strategy,
            mean_acceptance_length=spec.mean_acceptance_length,
            draft_acceptance_rate=spec.draft_acceptance_rate,
            num_spec_steps=spec.num_spec_steps,
            num_draft_tokens=spec.num_draft_tokens,
            num_accepted_draft_tokens=spec.num_accepted_draft_tokens,
            acceptance_histogram=tuple(spec.acceptance_histogram),
            accepted_by_source=dict(spec.accepted_by_source),
            switches=tuple(spec.switches),
            seconds_saved=spec.seconds_saved,
            rule=spec.rule,
            learnt=spec.learnt,
            num_spec_tokens=spec.num_spec_tokens,
        ),
        timing=Timing(
            queue_s=timing.queue_s,
            time_to_first_token_s=timing.time_to_first_token_s,
            total_s=timing.total_s,
            tokens_per_second=timing.tokens_per_second,
        ),
        prompt_token_ids=tuple(end.prompt_token_ids),
        seed=end.seed,
        model=end.model,
        request_id=end.request_id,
        comparisons=tuple(_read_comparison(each) for each in end.comparisons),
        passes=tuple(report for chunk in chunks for report in chunk.passes),
        origins=_fitted([origin for chunk in chunks for origin in chunk.origins], len(text)),
        arithmetic=end.arithmetic,
        prompt_logprobs=tuple(entry for chunk in chunks for entry in chunk.prompt_logprobs),
    )


def _read_comparison(wire: pb.Comparison) -> Comparison:
    return Comparison(
        strategy=wire.strategy,
        num_passes=wire.num_passes if wire.HasField("num_passes") else None,
        tokens_per_pass=wire.tokens_per_pass if wire.HasField("tokens_per_pass") else None,
        seconds=wire.seconds if wire.HasField("seconds") else None,
        exact=wire.exact,
        without=tuple(wire.without),
    )


def _fitted(origins: Sequence[TokenOrigin], characters: int) -> tuple[TokenOrigin, ...]:
    """Origins whose lengths add up to the text: nothing of a stop string that was cut off; the last one takes the rest."""
    fitted, left = list[TokenOrigin](), characters
    for index, origin in enumerate(origins):
        length = left if index == len(origins) - 1 else min(origin.text_length, left)
        fitted.append(TokenOrigin(source=origin.source, text_length=length))
        left -= length
    return tuple(fitted)


def read_models(wire: pb.ListModelsResponse) -> list[Model]:
    """The served models."""
    return [
        Model(
            name=model.name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            strategies=tuple(model.strategies),
            default_strategy=model.default_strategy,
            bit_exact=model.bit_exact,
            defaults=_read_defaults(model.defaults),
            processors={processor.name: processor.value for processor in model.processors},
            adapters=tuple(model.adapters),
            drafters=tuple(NameableDrafter(name=each.name, strategy=each.strategy) for each in model.drafters),
            weights=ServedWeights(
                stored=model.weights.stored,
                multiplied=tuple(model.weights.multiplied),
                kernels=model.weights.kernels,
                rounded_inputs=model.weights.rounded_inputs,
                rounded_cache=model.weights.rounded_cache,
            ),
            created=model.created,
        )
        for model in wire.models
    ]


def _read_defaults(wire: pb.SamplingDefaults) -> dict[str, Any]:
    """What is set, by name."""
    return {field.name: tuple(value) if field.is_repeated else value for field, value in wire.ListFields()}
