"""The messages between router and verifier <-> verification.proto."""

from __future__ import annotations

import dataclasses
from typing import Any, cast, get_args

from outrider.internal.v1 import verification_pb2
from services.links.codec.trees import check_size
from speculation import limits
from speculation.errors import InvalidArgument
from speculation.messages import Finished, GenerationRequest, Progress, VerifierCard
from speculation.types import (
    AcceptanceRule,
    FinishReason,
    GrammarKind,
    Plan,
    SamplingDefaults,
    SamplingParams,
    StructuredOutputs,
    TokenLogprobs,
)

_REASONS = {
    FinishReason.STOP: verification_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: verification_pb2.FINISH_REASON_LENGTH,
}
_REASONS_BACK = {wire: reason for reason, wire in _REASONS.items()}


def encode_generation(message: GenerationRequest) -> verification_pb2.VerifyRequest:
    """Router to verifier."""
    sampling, plan = message.sampling, message.plan
    return verification_pb2.VerifyRequest(
        request_id=message.request_id,
        prompt_token_ids=message.prompt,
        committed_token_ids=message.committed,
        sampling=verification_pb2.SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop=sampling.stop,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=sampling.logit_bias,
            logprobs=sampling.logprobs,
            ignore_generation_config=sampling.ignore_generation_config,
            structured_outputs=_encode_structured(sampling.structured_outputs),
            allowed_token_ids=sampling.allowed_token_ids,
            bad_words=[verification_pb2.TokenSequence(token_ids=word) for word in sampling.bad_words],
        ),
        plan=verification_pb2.Plan(
            strategy=plan.strategy,
            sources=plan.sources,
            max_nodes=plan.max_nodes,
            acceptance=plan.acceptance,
            observe_top_k=plan.observe_top_k,
            observe_layers=plan.observe_layers,
            observe_prompt=plan.observe_prompt,
        ),
        tenant=message.tenant,
        traceparent=message.traceparent,
        prediction_token_ids=message.prediction,
        weight=message.weight,
        cache_salt=message.cache_salt,
        priority=message.priority,
    )


def _encode_structured(form: StructuredOutputs | None) -> verification_pb2.StructuredOutputs | None:
    return None if form is None else verification_pb2.StructuredOutputs(kind=form.kind, text=form.text)


def _decode_structured(wire: verification_pb2.StructuredOutputs) -> StructuredOutputs:
    if wire.kind not in get_args(GrammarKind):
        raise InvalidArgument("structured_outputs.kind", wire.kind, f"one of {', '.join(get_args(GrammarKind))}")
    return StructuredOutputs(kind=cast(GrammarKind, wire.kind), text=wire.text)


def decode_generation(wire: verification_pb2.VerifyRequest) -> GenerationRequest:
    """Decode a message from router to verifier.

    Raises:
        InvalidArgument: a value is outside its range.
    """
    return GenerationRequest(
        request_id=wire.request_id,
        prompt=tuple(wire.prompt_token_ids),
        committed=tuple(wire.committed_token_ids),
        sampling=_decode_sampling(wire.sampling),
        plan=_decode_plan(wire.plan),
        tenant=wire.tenant if wire.HasField("tenant") else None,
        traceparent=wire.traceparent,
        prediction=tuple(wire.prediction_token_ids),
        weight=_decode_weight(wire.weight) if wire.HasField("weight") else 1.0,
        cache_salt=wire.cache_salt,
        priority=wire.priority,
    )


def _decode_weight(weight: float) -> float:
    if not 0.01 <= weight <= 100:
        raise InvalidArgument("weight", weight, "from 0.01 to 100")
    return weight


def _decode_sampling(wire: verification_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=wire.temperature,
        top_k=wire.top_k,
        top_p=wire.top_p,
        min_p=wire.min_p,
        seed=wire.seed,
        max_tokens=wire.max_tokens,
        min_tokens=wire.min_tokens,
        stop=tuple(wire.stop),
        stop_token_ids=tuple(wire.stop_token_ids),
        ignore_eos=wire.ignore_eos,
        repetition_penalty=wire.repetition_penalty,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        logit_bias=dict(wire.logit_bias),
        logprobs=wire.logprobs if wire.HasField("logprobs") else None,
        ignore_generation_config=wire.ignore_generation_config,
        structured_outputs=_decode_structured(wire.structured_outputs) if wire.HasField("structured_outputs") else None,
        allowed_token_ids=tuple(wire.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in wire.bad_words),
    )


def _decode_plan(wire: verification_pb2.Plan) -> Plan:
    check_size("plan.sources", len(wire.sources), limits.MAX_SOURCES)
    check_size("plan.max_nodes", wire.max_nodes, limits.MAX_TREE_NODES)
    check_size("plan.observe_top_k", wire.observe_top_k, limits.MAX_TOP_IDS)
    check_size("plan.observe_layers", len(wire.observe_layers), limits.MAX_LAYERS)
    return Plan(
        strategy=wire.strategy,
        sources=tuple(wire.sources),
        max_nodes=wire.max_nodes,
        acceptance=acceptance_rule(wire.acceptance),
        observe_top_k=wire.observe_top_k,
        observe_layers=tuple(wire.observe_layers),
        observe_prompt=wire.observe_prompt,
    )


def encode_forget(tenant: str) -> verification_pb2.ForgetRequest:
    """Router to verifier."""
    return verification_pb2.ForgetRequest(tenant=tenant)


def decode_forget(wire: verification_pb2.ForgetRequest) -> str:
    return wire.tenant


def acceptance_rule(name: str) -> AcceptanceRule:
    """Check the name of an acceptance rule.

    Raises:
        InvalidArgument: there is no such rule.
    """
    if name not in ("walk", "rejection"):
        raise InvalidArgument("acceptance", name, "walk or rejection")
    return cast(AcceptanceRule, name)


def encode_generation_event(message: Progress | Finished) -> verification_pb2.VerifyResponse:
    """Verifier to router."""
    if isinstance(message, Finished):
        finished = verification_pb2.Finished(reason=_REASONS[message.reason])
        return verification_pb2.VerifyResponse(finished=finished)
    progress = verification_pb2.Progress(
        token_ids=message.token_ids,
        logprobs=[_encode_logprobs(entry) for entry in message.logprobs],
        num_drafted=message.num_drafted,
        queue_s=message.queue_s,
        cached_tokens=message.cached_tokens,
        accepted_sources=message.accepted_sources,
        switches=message.switches,
        saved_s=message.saved_s,
    )
    return verification_pb2.VerifyResponse(progress=progress)


def decode_generation_event(wire: verification_pb2.VerifyResponse) -> Progress | Finished:
    """Decode a message from verifier to router.

    Raises:
        InvalidArgument: no event, or an unknown reason.
    """
    match wire.WhichOneof("event"):
        case "finished":
            reason = _REASONS_BACK.get(wire.finished.reason)
            if reason is None:
                raise InvalidArgument("finished.reason", wire.finished.reason, "STOP or LENGTH")
            return Finished(reason=reason)
        case "progress":
            return Progress(
                token_ids=tuple(wire.progress.token_ids),
                num_drafted=wire.progress.num_drafted,
                queue_s=wire.progress.queue_s,
                cached_tokens=wire.progress.cached_tokens,
                accepted_sources=tuple(wire.progress.accepted_sources),
                switches=tuple(wire.progress.switches),
                saved_s=wire.progress.saved_s,
                logprobs=tuple(_decode_logprobs(entry) for entry in wire.progress.logprobs),
            )
        case _:
            raise InvalidArgument("event", "unset", "progress or finished")


def _encode_logprobs(entry: TokenLogprobs) -> verification_pb2.TokenLogprobs:
    return verification_pb2.TokenLogprobs(
        token_id=entry.token_id, logprob=entry.logprob, top_ids=entry.top_ids, top_logprobs=entry.top_logprobs
    )


def _decode_logprobs(wire: verification_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=wire.token_id,
        logprob=wire.logprob,
        top_ids=tuple(wire.top_ids),
        top_logprobs=tuple(wire.top_logprobs),
    )


def encode_card(card: VerifierCard) -> verification_pb2.DescribeResponse:
    """Verifier to router: what is served, and the load."""
    return verification_pb2.DescribeResponse(
        model=card.model,
        max_model_len=card.max_model_len,
        vocab_size=card.vocab_size,
        running=card.running,
        waiting=card.waiting,
        free_blocks=card.free_blocks,
        total_blocks=card.total_blocks,
        bit_exact=card.bit_exact,
        defaults=verification_pb2.SamplingDefaults(**default_fields(card.defaults)),
        processors=[verification_pb2.Processor(name=name, value=value) for name, value in card.processors],
        arithmetic=card.arithmetic,
    )


def decode_card(wire: verification_pb2.DescribeResponse) -> VerifierCard:
    return VerifierCard(
        model=wire.model,
        max_model_len=wire.max_model_len,
        vocab_size=wire.vocab_size,
        running=wire.running,
        waiting=wire.waiting,
        free_blocks=wire.free_blocks,
        total_blocks=wire.total_blocks,
        bit_exact=wire.bit_exact,
        defaults=_decode_defaults(wire.defaults),
        processors=tuple((processor.name, processor.value) for processor in wire.processors),
        arithmetic=wire.arithmetic,
    )


def default_fields(defaults: SamplingDefaults) -> dict[str, Any]:
    """The defaults by field name, as keyword arguments of the internal and the public message alike."""
    return dataclasses.asdict(defaults)


def _decode_defaults(wire: verification_pb2.SamplingDefaults) -> SamplingDefaults:
    given = {field.name: value for field, value in wire.ListFields()}
    return SamplingDefaults(**{**given, "stop": tuple(wire.stop)})
