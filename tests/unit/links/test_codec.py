"""Every internal message there and back, every field of every proto message used."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor

from outrider.internal.v1 import drafting_pb2, held_models_pb2, tree_pb2, verification_pb2
from services.links.codec import drafting, held_models, retrieval, trees, verification
from speculation import limits
from speculation.adapters import AdapterOrder
from speculation.errors import InvalidArgument, MalformedTree
from speculation.held_models import DrafterCard, HeldModel
from speculation.messages import (
    CloseSession,
    DecodingCounts,
    Draft,
    DraftFailure,
    DraftNoise,
    FeatureChunk,
    Finished,
    ForgetTenant,
    Forgotten,
    GenerationRequest,
    OpenSession,
    PassReport,
    Progress,
    ReplayedAnswer,
    RetrievalQuery,
    ServedWeights,
    StepReport,
    VerifierCard,
)
from speculation.reloads import ReloadOrder
from speculation.tree import chain
from speculation.types import (
    Features,
    FinishReason,
    Observation,
    Plan,
    Proposal,
    SamplingDefaults,
    SamplingParams,
    StructuredOutputs,
    TokenLogprobs,
    TokenTree,
)
from tests.running.refusals import refuses

TREE = TokenTree(
    tokens=(7, 8, 9),
    parents=(-1, 0, -1),
    sources=("a", "b", "a"),
    scores=(0.5, 0.25, 0.125),
    probes=(2,),
    proposals=(
        Proposal(token_ids=(7, 9), probabilities=(0.75, 0.25)),
        Proposal(token_ids=(8,), probabilities=(1.0,)),
        Proposal(token_ids=(9,), probabilities=(1.0,)),
    ),
)
OPEN = OpenSession(
    session_id="s",
    tokens=(1, 2, 3),
    prompt_length=2,
    sources=("a",),
    max_nodes=9,
    tenant="somebody",
    traceparent="00-1-2-01",
    temperature=0.5,
    noise=DraftNoise(seed=2**63 + 5, top_k=3, top_p=0.75, min_p=0.25),
    sampled=True,
    prediction=(4, 5),
    group="g",
    adapter="lora",
)
STEP = StepReport(
    session_id="s",
    committed=(4, 5),
    length=5,
    prefix_hash=2**63 + 1,
    accepted_path=(0,),
    max_nodes=3,
    min_probability=0.25,
    observation=Observation(
        tree=TREE,
        top_ids=((1, 2), (3, 4), (5, 6), (7, 8)),
        probe_ids=((7, 8),),
        probe_chances=((0.5, 0.25),),
        features=Features(data=b"\x01\x02", rows=1, width=1, dtype="float16"),
    ),
)
DRAFT = Draft(
    session_id="s",
    base_length=5,
    base_hash=11,
    assumed=(4, 5),
    tree=TREE,
    drafting_s=0.5,
    group="g",
    more=True,
    unready=True,
)
CHUNK = FeatureChunk(
    session_id="s", features=Features(data=b"12345678", rows=2, width=2, dtype="bfloat16", start=5, layers=(2, -1))
)
RELOAD = ReloadOrder(reload_id="r", step="pause", folder="/weights/b", running="restart", within_s=2.5)
GENERATION = GenerationRequest(
    request_id="r",
    whole=True,
    prompt=(1, 2),
    committed=(3,),
    sampling=SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        seed=2**64 - 1,
        max_tokens=9,
        min_tokens=2,
        stop=("x", "y"),
        stop_token_ids=(4,),
        ignore_eos=True,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={3: 1.5},
        logprobs=2,
        ignore_generation_config=True,
        structured_outputs=StructuredOutputs(kind="regex", text="a+"),
        allowed_token_ids=(4, 5),
        bad_words=((1, 2), (3,)),
        prompt_logprobs=3,
    ),
    plan=Plan(
        strategy="p",
        sources=("a", "b"),
        max_nodes=4,
        acceptance="rejection",
        observe_top_k=8,
        observe_layers=(-1, 3),
        observe_prompt=True,
        report_passes=True,
    ),
    tenant="t",
    weight=2.5,
    traceparent="00-1-2-01",
    prediction=(6, 7),
    cache_salt="s",
    priority=-3,
    arithmetic="0123456789abcdef",
    tokenizer="0c1d",
    group="g",
    adapter="lora",
)
QUERY = RetrievalQuery(
    suffix=(1, 2),
    max_continuations=3,
    max_length=4,
    state=Features(data=b"\x01\x02", rows=1, width=1, dtype="float16"),
    session_id="s",
    traceparent="00-1-2-01",
)
PROGRESS = Progress(
    token_ids=(1, 2),
    queue_s=0.5,
    cached_tokens=1,
    num_drafted=3,
    accepted_sources=("a",),
    switches=("8: fspad left out",),
    saved_s=-0.25,
    prompt_logprobs=(TokenLogprobs(token_id=7, logprob=-2.5, top_ids=(2,), top_logprobs=(-0.125,)),),
    arithmetic="0123456789abcdef",
    restarted=True,
    logprobs=(TokenLogprobs(token_id=1, logprob=-0.5, top_ids=(1, 3), top_logprobs=(-0.5, -1.5)),),
    report=PassReport(tree=TREE, checked=2, accepted_path=(0, 1), seconds=0.25, waited_s=0.125, requests=3),
)
CARD = VerifierCard(
    model="m",
    max_model_len=1,
    vocab_size=2,
    running=3,
    waiting=4,
    free_blocks=5,
    total_blocks=6,
    bit_exact=True,
    arithmetic="0a1b",
    defaults=SamplingDefaults(
        temperature=0.0,
        top_k=0,
        top_p=0.5,
        min_p=0.0,
        repetition_penalty=1.5,
        max_tokens=3,
        min_tokens=0,
        max_length=4,
        min_length=0,
        stop=("x",),
    ),
    processors=(("b", "1"), ("a", "[2]")),
    counts=DecodingCounts(
        tokens=2**40,
        passes=7,
        prompt_tokens=8,
        cached_prompt_tokens=9,
        drafted_by_source={"a": 2, "b": 1},
        accepted_by_source={"a": 1},
        saved_s=-0.5,
    ),
    drafters={"d": True, "e": False},
    adapters={"lora": "0a1c"},
    paused="keep",
    pause_id="p",
    weights=ServedWeights(
        stored="FP8",
        multiplied=("Q4_0", "float32"),
        kernels="native",
        rounded_inputs="FP8 of rows",
        rounded_cache="FP8 of heads",
    ),
    held=(
        HeldModel(kind="fspad", name="code", layers=(-1, 3), tenants=("a", "b"), when='{"sampled": true}', blended=False),
        HeldModel(kind="medusa"),
    ),
)
DRAFTER = DrafterCard(held=CARD.held or (), target="m", tokenizer="0c", version="1.2.3")
ADAPTING = AdapterOrder(order_id="o", step="load", name="lora", folder="/adapters/lora", within_s=2.5)

# Such as share a message with others; see test_columns.py.
TWO_TOKENS = chain([7, 8], "suffix", [0.5, 0.25])
STEP_OF_IDS = replace(STEP, observation=Observation(tree=TWO_TOKENS, top_ids=((7, 1), (8, 2), (9, 3))))
DRAFT_OF_TOKENS = Draft(session_id="s", base_length=7, base_hash=2**63, tree=TWO_TOKENS, drafting_s=0.5)

CASES: list[tuple[Any, Any, Any]] = [
    *((message, drafting.encode_drafting_call, drafting.decode_drafting_call) for message in (OPEN, STEP, CHUNK, CloseSession(session_id="s"), ForgetTenant(tenant="t", forget_id=2**64 - 1))),
    *((message, drafting.encode_drafting_reply, drafting.decode_drafting_reply) for message in (DRAFT, DraftFailure(session_id="s", reason="r", reopen=True), Forgotten(forget_id=2**64 - 1))),
    *((message, lambda both: next(drafting.encode_drafting_calls(both)), drafting.decode_drafting_calls) for message in ([STEP_OF_IDS, replace(STEP_OF_IDS, session_id="t", observation=None)], [STEP], [OPEN])),
    *((message, lambda both: next(drafting.encode_drafting_replies(both)), drafting.decode_drafting_replies) for message in ([replace(DRAFT_OF_TOKENS, group="g"), DRAFT_OF_TOKENS], [DRAFT])),
    (GENERATION, verification.encode_generation, verification.decode_generation),
    # No tenant is another thing than the one without a name.
    *((replace(GENERATION, tenant=tenant), verification.encode_generation, verification.decode_generation) for tenant in (None, "")),
    *((replace(OPEN, tenant=tenant), drafting.encode_drafting_call, drafting.decode_drafting_call) for tenant in (None, "")),
    ([QUERY], partial(retrieval.encode_queries, 7), retrieval.decode_queries),
    *((replace(PROGRESS, report=report), verification.encode_generation_event, verification.decode_generation_event) for report in (PROGRESS.report, None)),
    *((Finished(reason=reason), verification.encode_generation_event, verification.decode_generation_event) for reason in FinishReason),
    ((GENERATION, (GENERATION.plan, replace(GENERATION.plan, sources=("c",)))), lambda both: verification.encode_comparing(*both), verification.decode_comparing),
    ((ReplayedAnswer(num_passes=3, seconds=0.5), ReplayedAnswer(num_passes=None, seconds=None)), verification.encode_comparisons, verification.decode_comparisons),
    ("tenant", verification.encode_forget, verification.decode_forget),
    (ADAPTING, verification.encode_adapting, verification.decode_adapting),
    ("a digest", verification.encode_adapted, verification.decode_adapted),
    (RELOAD, verification.encode_reload, verification.decode_reload),
    ("digest", verification.encode_reloaded, verification.decode_reloaded),
    (CARD, verification.encode_card, verification.decode_card),
    (replace(CARD, defaults=SamplingDefaults(), processors=()), verification.encode_card, verification.decode_card),
    # Nobody has told is another thing than that nothing is held.
    *((replace(CARD, held=held), verification.encode_card, verification.decode_card) for held in (None, ())),
    (DRAFTER, held_models.encode_drafter, held_models.decode_drafter),
    (TREE, trees.encode_tree, trees.decode_tree),
]  # fmt: skip


@pytest.mark.parametrize(("message", "encode", "decode"), CASES, ids=lambda value: type(value).__name__)
def test_there_and_back(message: Any, encode: Any, decode: Any) -> None:
    wire = encode(message)
    assert decode(type(wire).FromString(wire.SerializeToString())) == message


def used_fields(message: Any, found: set[str]) -> None:
    for descriptor, value in message.ListFields():
        found.add(descriptor.full_name)
        if descriptor.message_type is not None and not descriptor.message_type.GetOptions().map_entry:
            for part in value if not hasattr(value, "ListFields") else [value]:
                used_fields(part, found)


def all_fields(descriptor: Descriptor, found: set[str]) -> None:
    for field in descriptor.fields:
        found.add(field.full_name)
    for nested in descriptor.nested_types:
        if not nested.GetOptions().map_entry:
            all_fields(nested, found)


def test_every_field_of_every_message_is_used() -> None:
    used: set[str] = set()
    for message, encode, _ in CASES:
        used_fields(encode(message), used)
    existing: set[str] = set()
    for module in (tree_pb2, drafting_pb2, held_models_pb2, verification_pb2):
        for descriptor in module.DESCRIPTOR.message_types_by_name.values():
            all_fields(descriptor, existing)
    assert existing - used == set()


def test_unknown_orders_are_refused() -> None:
    for field in ("step", "running"):
        wire = verification.encode_reload(RELOAD)
        setattr(wire, field, "sideways")
        with refuses(InvalidArgument, field=field, value="sideways"):
            verification.decode_reload(wire)


@pytest.mark.parametrize("within_s", [-1.0, 1e9, math.inf, math.nan])
def test_orders_name_a_time_that_can_be_waited(within_s: float) -> None:
    for order, encode, decode in (
        (RELOAD, verification.encode_reload, verification.decode_reload),
        (ADAPTING, verification.encode_adapting, verification.decode_adapting),
    ):
        wire = encode(replace(order, within_s=within_s))
        with refuses(InvalidArgument, field="within_s"):
            decode(wire)


@pytest.mark.parametrize(
    ("wrong", "field", "value"),
    [
        ([{"kind": "suffix"}], "kind", "suffix"),
        ([{}], "kind", "empty"),
        ([{"kind": "fspad", "name": "no name"}], "name", "no name"),
        ([{"kind": "fspad", "name": "medusa"}], "name", "medusa"),
        ([{"kind": "fspad", "name": "code"}, {"kind": "medusa", "name": "code"}], "name", "code"),
        ([{"kind": "fspad"}, {"kind": "fspad"}], "name", "fspad"),
        ([{"kind": "fspad", "layers": [1] * 17}], "layers", "17 long"),
        ([{"kind": "fspad", "tenants": ["a"] * 65}], "tenants", "65 long"),
        ([{"kind": "fspad", "tenants": ["a" * 513]}], "tenants", "513 long"),
        ([{"kind": "fspad", "when": "x" * 65_537}], "when", "65537 long"),
    ],
)
def test_what_a_drafter_holds_is_refused_where_it_is_wrong(wrong: list[dict[str, Any]], field: str, value: str) -> None:
    wire = held_models_pb2.HeldModels(models=[held_models_pb2.HeldModel(**each) for each in wrong])
    with refuses(InvalidArgument, field=f"models.{field}", value=value):
        held_models.decode_held(wire)


@pytest.mark.parametrize("field", ["target", "tokenizer", "version"])
def test_what_a_drafter_tells_of_itself_is_short_enough_for_a_line_of_the_log(field: str) -> None:
    for characters, refused in ((4096, False), (4097, True)):
        wire = drafting_pb2.DraftingServiceDescribeResponse(**{field: "x" * characters})
        if refused:
            with refuses(InvalidArgument, field=field, value="4097 long"):
                held_models.decode_drafter(wire)
        else:
            assert held_models.decode_drafter(wire).held == ()


def test_limits_are_enforced_when_decoding() -> None:
    many = [1] * (limits.MAX_TREE_NODES + 1)
    with refuses(MalformedTree, field="tree.tokens", value="513 entries"):
        trees.decode_tree(tree_pb2.TokenTree(tokens=many))
    with refuses(MalformedTree, field="tree.sources[0]", value=3):
        trees.decode_tree(tree_pb2.TokenTree(tokens=[1], parents=[-1], sources=[3], source_names=["a"]))
    with refuses(MalformedTree, field="tree.source_names", value="17 names"):
        trees.decode_tree(tree_pb2.TokenTree(source_names=[str(i) for i in range(17)]))
    with refuses(InvalidArgument, field="open.max_nodes", value="513 long"):
        drafting.decode_drafting_call(drafting_pb2.DraftRequest(open=drafting_pb2.OpenSession(max_nodes=513)))
    with refuses(InvalidArgument, field="event", value="unset"):
        drafting.decode_drafting_call(drafting_pb2.DraftRequest())
    with refuses(InvalidArgument, field="acceptance", value="empty"):
        verification.decode_generation(
            verification_pb2.VerifyRequest(
                sampling=verification_pb2.SamplingParams(top_p=1, max_tokens=1, repetition_penalty=1)
            )
        )


def test_a_draft_that_breaks_a_limit_concerns_its_session_only() -> None:
    wire = drafting_pb2.DraftResponse(draft=drafting_pb2.Draft(session_id="s", tree=tree_pb2.TokenTree(tokens=[1] * 600)))
    reply = drafting.decode_drafting_reply(wire)
    assert isinstance(reply, DraftFailure)
    assert reply.session_id == "s"
    assert "at most 512" in reply.reason


@pytest.mark.parametrize(("sent", "read"), [(0.5, 0.5), (-1.0, 0.0), (float("nan"), 0.0), (float("inf"), 0.0)])
def test_the_time_a_draft_took_travels_and_nonsense_in_it_counts_as_none(sent: float, read: float) -> None:
    reply = drafting.decode_drafting_reply(drafting_pb2.DraftResponse(draft=drafting_pb2.Draft(drafting_s=sent)))
    assert isinstance(reply, Draft)
    assert reply.drafting_s == read
