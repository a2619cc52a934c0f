"""The messages between router and verifier <-> verification.proto."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from outrider.internal.v1 import verification_pb2
from services.in_turns import in_turns
from services.links.codec.checks import check_size, one_of
from services.links.codec.held_models import decode_held, encode_held
from services.links.codec.same_fields import SameFields
from services.links.codec.trees import decode_tree, encode_tree
from speculation import limits
from speculation.adapters import AdapterOrder, AdapterStep
from speculation.errors import InvalidArgument
from speculation.messages import (
    DecodingCounts,
    Finished,
    GenerationRequest,
    PassReport,
    Progress,
    ReplayedAnswer,
    ServedWeights,
    VerifierCard,
)
from speculation.reloads import ReloadOrder, ReloadStep, RunningAnswers
from speculation.types import (
    AcceptanceRule,
    Effort,
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


_SAMPLING = SameFields(
    SamplingParams, verification_pb2.SamplingParams, by_hand=("logit_bias", "structured_outputs", "bad_words")
)
_PLAN = SameFields(Plan, verification_pb2.Plan, by_hand=("acceptance", "effort"))
_REQUEST = SameFields(
    GenerationRequest,
    verification_pb2.VerifyRequest,
    renamed={
        "prompt": "prompt_token_ids",
        "committed": "committed_token_ids",
        "prediction": "prediction_token_ids",
    },
    by_hand=("sampling", "plan", "weight"),
)
_LOGPROBS = SameFields(TokenLogprobs, verification_pb2.TokenLogprobs)
# The fields of a step that are log-probabilities.
_OF_TOKENS = ("logprobs", "prompt_logprobs")
_PROGRESS = SameFields(Progress, verification_pb2.Progress, by_hand=(*_OF_TOKENS, "report"))
_REPORT = SameFields(PassReport, verification_pb2.PassReport, by_hand=("tree",))
_COMPARISON = SameFields(ReplayedAnswer, verification_pb2.ReplayedAnswer)
_BY_SOURCE = ("drafted_by_source", "accepted_by_source")
_COUNTS = SameFields(DecodingCounts, verification_pb2.DecodingCounts, by_hand=_BY_SOURCE)
_CARD = SameFields(
    VerifierCard,
    verification_pb2.DescribeResponse,
    by_hand=("defaults", "processors", "counts", "drafters", "adapters", "weights", "held"),
)
_WEIGHTS = SameFields(ServedWeights, verification_pb2.ServedWeights)

_ADAPTING = SameFields(AdapterOrder, verification_pb2.AdaptRequest)
_RELOAD = SameFields(ReloadOrder, verification_pb2.ReloadRequest)


def encode_generation(message: GenerationRequest) -> verification_pb2.VerifyRequest:
    """Router to verifier."""
    sampling, plan = message.sampling, message.plan
    return _REQUEST.encode(
        message,
        sampling=_SAMPLING.encode(
            sampling,
            logit_bias=sampling.logit_bias,
            structured_outputs=_encode_structured(sampling.structured_outputs),
            bad_words=[verification_pb2.TokenSequence(token_ids=word) for word in sampling.bad_words],
        ),
        plan=_encode_plan(plan),
        weight=message.weight,
    )


def _encode_plan(plan: Plan) -> verification_pb2.Plan:
    return _PLAN.encode(plan, acceptance=plan.acceptance, effort=plan.effort)


def _encode_structured(form: StructuredOutputs | None) -> verification_pb2.StructuredOutputs | None:
    return None if form is None else verification_pb2.StructuredOutputs(kind=form.kind, text=form.text)


def _decode_structured(wire: verification_pb2.StructuredOutputs) -> StructuredOutputs:
    return StructuredOutputs(kind=one_of("structured_outputs.kind", wire.kind, GrammarKind), text=wire.text)


def decode_generation(wire: verification_pb2.VerifyRequest) -> GenerationRequest:
    """Decode a message from router to verifier.

    Raises:
        InvalidArgument: a value is outside its range.
    """
    return _REQUEST.decode(
        wire,
        sampling=_decode_sampling(wire.sampling),
        plan=_decode_plan(wire.plan),
        weight=_decode_weight(wire.weight) if wire.HasField("weight") else 1.0,
    )


def _decode_weight(weight: float) -> float:
    if not 0.01 <= weight <= 100:
        raise InvalidArgument("weight", weight, "from 0.01 to 100")
    return weight


def _decode_sampling(wire: verification_pb2.SamplingParams) -> SamplingParams:
    # Each is an object of its own: a million of them would be made while everybody waits.
    check_size("bad_words", len(wire.bad_words), limits.MAX_SPELLINGS)
    check_size("logit_bias", len(wire.logit_bias), limits.MAX_LOGIT_BIAS)
    return _SAMPLING.decode(
        wire,
        logit_bias=dict(wire.logit_bias),
        structured_outputs=_decode_structured(wire.structured_outputs) if wire.HasField("structured_outputs") else None,
        bad_words=tuple(tuple(word.token_ids) for word in wire.bad_words),
    )


def _decode_plan(wire: verification_pb2.Plan) -> Plan:
    check_size("plan.sources", len(wire.sources), limits.MAX_SOURCES)
    check_size("plan.max_nodes", wire.max_nodes, limits.MAX_TREE_NODES)
    check_size("plan.observe_top_k", wire.observe_top_k, limits.MAX_TOP_IDS)
    check_size("plan.observe_layers", len(wire.observe_layers), limits.MAX_LAYERS)
    # A router of an earlier version says no effort.
    effort = one_of("plan.effort", wire.effort or "measured", Effort)
    return _PLAN.decode(wire, acceptance=one_of("acceptance", wire.acceptance, AcceptanceRule), effort=effort)


def encode_comparing(message: GenerationRequest, plans: Sequence[Plan]) -> verification_pb2.CompareRequest:
    """Router to verifier."""
    return verification_pb2.CompareRequest(request=encode_generation(message), plans=[_encode_plan(plan) for plan in plans])


def decode_comparing(wire: verification_pb2.CompareRequest) -> tuple[GenerationRequest, tuple[Plan, ...]]:
    """Decode a message from router to verifier.

    Raises:
        InvalidArgument: a value is outside its range.
    """
    check_size("plans", len(wire.plans), limits.MAX_COMPARED)
    return decode_generation(wire.request), tuple(_decode_plan(plan) for plan in wire.plans)


def encode_comparisons(found: Sequence[ReplayedAnswer]) -> verification_pb2.CompareResponse:
    """Verifier to router."""
    return verification_pb2.CompareResponse(comparisons=[_COMPARISON.encode(each) for each in found])


def decode_comparisons(wire: verification_pb2.CompareResponse) -> tuple[ReplayedAnswer, ...]:
    return tuple(_COMPARISON.decode(each) for each in wire.comparisons)


def encode_forget(tenant: str) -> verification_pb2.ForgetRequest:
    """Router to verifier."""
    return verification_pb2.ForgetRequest(tenant=tenant)


def decode_forget(wire: verification_pb2.ForgetRequest) -> str:
    return wire.tenant


def encode_adapting(order: AdapterOrder) -> verification_pb2.AdaptRequest:
    """Router to verifier."""
    return _ADAPTING.encode(order)


def decode_adapting(wire: verification_pb2.AdaptRequest) -> AdapterOrder:
    """Decode a message from router to verifier.

    Raises:
        InvalidArgument: an unknown step, or no time within which it may be taken.
    """
    one_of("step", wire.step, AdapterStep)
    _check_within(wire.within_s)
    return _ADAPTING.decode(wire)


def encode_adapted(digest: str) -> verification_pb2.AdaptResponse:
    """Verifier to router."""
    return verification_pb2.AdaptResponse(digest=digest)


def decode_adapted(wire: verification_pb2.AdaptResponse) -> str:
    return wire.digest


def encode_reload(order: ReloadOrder) -> verification_pb2.ReloadRequest:
    """Router to verifier."""
    return _RELOAD.encode(order)


def decode_reload(wire: verification_pb2.ReloadRequest) -> ReloadOrder:
    """Decode the message of ``encode_reload``.

    Raises:
        InvalidArgument: there is no such step, fate of running answers, or time; names the field.
    """
    one_of("step", wire.step, ReloadStep)
    one_of("running", wire.running, RunningAnswers)
    _check_within(wire.within_s)
    return _RELOAD.decode(wire)


def _check_within(within_s: float) -> None:
    _, most = limits.RELOAD_WITHIN_S
    if not 0 <= within_s <= most:
        raise InvalidArgument("within_s", within_s, f"a number from 0 to {most:g}")


def encode_reloaded(weights: str) -> verification_pb2.ReloadResponse:
    """Verifier to router: the digest of the new weights."""
    return verification_pb2.ReloadResponse(weights=weights)


def decode_reloaded(wire: verification_pb2.ReloadResponse) -> str:
    return wire.weights


def encode_generation_event(message: Progress | Finished) -> verification_pb2.VerifyResponse:
    """Verifier to router."""
    if isinstance(message, Finished):
        finished = verification_pb2.Finished(reason=_REASONS[message.reason])
        return verification_pb2.VerifyResponse(finished=finished)
    told = {name: [_LOGPROBS.encode(entry) for entry in getattr(message, name)] for name in _OF_TOKENS}
    report = None if message.report is None else _REPORT.encode(message.report, tree=encode_tree(message.report.tree))
    return verification_pb2.VerifyResponse(progress=_PROGRESS.encode(message, report=report, **told))


def decode_generation_event(wire: verification_pb2.VerifyResponse) -> Progress | Finished:
    """Decode a message from verifier to router.

    Raises:
        InvalidArgument: no event, an unknown reason, or a tree that is too large.
    """
    match wire.WhichOneof("event"):
        case "finished":
            reason = _REASONS_BACK.get(wire.finished.reason)
            if reason is None:
                raise InvalidArgument("finished.reason", wire.finished.reason, "STOP or LENGTH")
            return Finished(reason=reason)
        case "progress":
            told = {name: tuple(map(_LOGPROBS.decode, getattr(wire.progress, name))) for name in _OF_TOKENS}
            report = _decode_report(wire.progress.report) if wire.progress.HasField("report") else None
            return _PROGRESS.decode(wire.progress, report=report, **told)
        case _:
            raise InvalidArgument("event", "unset", "progress or finished")


async def encode_event_in_turns(message: Progress | Finished) -> verification_pb2.VerifyResponse:
    """As ``encode_generation_event``, while others have their turns: a prompt may have many log-probabilities."""
    if isinstance(message, Finished) or not message.prompt_logprobs:
        return encode_generation_event(message)
    wire = encode_generation_event(dataclasses.replace(message, prompt_logprobs=()))
    async for part in in_turns(message.prompt_logprobs):
        wire.progress.prompt_logprobs.extend(map(_LOGPROBS.encode, part))
    return wire


async def decode_event_in_turns(wire: verification_pb2.VerifyResponse) -> Progress | Finished:
    """As ``decode_generation_event``, of a message of one's own, while others have their turns."""
    if not wire.progress.prompt_logprobs:
        return decode_generation_event(wire)
    found: list[TokenLogprobs] = []
    async for part in in_turns(wire.progress.prompt_logprobs):
        found += map(_LOGPROBS.decode, part)
    del wire.progress.prompt_logprobs[:]
    progress = decode_generation_event(wire)
    assert isinstance(progress, Progress)
    return dataclasses.replace(progress, prompt_logprobs=tuple(found))


def _decode_report(wire: verification_pb2.PassReport) -> PassReport:
    return _REPORT.decode(wire, tree=decode_tree(wire.tree))


def encode_card(card: VerifierCard) -> verification_pb2.DescribeResponse:
    """Verifier to router: what is served, and the load."""
    return _CARD.encode(
        card,
        defaults=verification_pb2.SamplingDefaults(**default_fields(card.defaults)),
        processors=[verification_pb2.Processor(name=name, value=value) for name, value in card.processors],
        counts=_COUNTS.encode(card.counts, **{name: getattr(card.counts, name) for name in _BY_SOURCE}),
        drafters=card.drafters,
        adapters=card.adapters,
        weights=_WEIGHTS.encode(card.weights),
        held=None if card.held is None else encode_held(card.held),
    )


def decode_card(wire: verification_pb2.DescribeResponse) -> VerifierCard:
    processors = tuple((processor.name, processor.value) for processor in wire.processors)
    counts = _COUNTS.decode(wire.counts, **{name: dict(getattr(wire.counts, name)) for name in _BY_SOURCE})
    return _CARD.decode(
        wire,
        defaults=_decode_defaults(wire.defaults),
        processors=processors,
        counts=counts,
        drafters=dict(wire.drafters),
        # A map has no order.
        adapters=dict(sorted(wire.adapters.items())),
        weights=_WEIGHTS.decode(wire.weights),
        held=decode_held(wire.held) if wire.HasField("held") else None,
    )


def default_fields(defaults: SamplingDefaults) -> dict[str, Any]:
    """The defaults by field name, as keyword arguments of the internal and the public message alike."""
    return dataclasses.asdict(defaults)


def _decode_defaults(wire: verification_pb2.SamplingDefaults) -> SamplingDefaults:
    given = {field.name: value for field, value in wire.ListFields()}
    return SamplingDefaults(**{**given, "stop": tuple(wire.stop)})
