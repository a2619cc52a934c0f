"""Reports and drafts of several sessions in one message: what comes out is what went in, in its order."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest

from outrider.internal.v1 import drafting_pb2, tree_pb2
from services.links.codec import columns, drafting
from services.links.codec.packed import packed
from speculation import limits
from speculation.arrays import array_of
from speculation.columns import DraftColumns, ReportColumns, SentReports
from speculation.errors import InvalidArgument
from speculation.id_rows import IdRows
from speculation.messages import (
    CloseSession,
    Draft,
    DraftFailure,
    DraftingCall,
    DraftingReply,
    Forgotten,
    OpenSession,
    StepReport,
)
from speculation.types import EMPTY_TREE, Features, Observation, Proposal, TokenTree
from tests.engine.fakes import random_tree
from tests.running.refusals import refuses

# Of the columns whose numbers are no uint32: what they are, as ``array`` has it.
KINDS = {"prefix_hashes": "Q", "min_probabilities": "d"}
NAMES = ("suffix", "recycling", "joined", "a model")


def tree_of(source: random.Random) -> TokenTree:
    made = random_tree(source, 6, 1 << 17)
    # As on the wire: scores are float32.
    scores = tuple(source.randrange(65) / 64 for _ in made.scores) if source.random() < 0.8 else ()
    return replace(made, sources=tuple(source.choice(NAMES) for _ in made.sources), scores=scores)


def report_of(source: random.Random, name: str) -> StepReport:
    tree, top = tree_of(source), source.randrange(4)
    committed = tuple(source.randrange(1 << 17) for _ in range(source.randint(0, 4)))
    ids = tuple(tuple(source.randrange(1 << 17) for _ in range(top)) for _ in range(1 + len(tree))) if top else ()
    observation: Observation | None = Observation(tree=tree, top_ids=ids) if top else None
    if observation is not None and source.random() < 0.1:
        features = Features(data=b"\0" * 8, rows=1, width=2, dtype="float32", start=3)
        observation = replace(observation, features=features)
    if observation is not None and len(tree) and source.random() < 0.1:
        observation = replace(observation, tree=replace(tree, probes=(len(tree) - 1,)), probe_ids=((5, 6),))
    return StepReport(
        session_id=name,
        committed=committed,
        length=source.randrange(1 << 20),
        prefix_hash=source.getrandbits(64),
        accepted_path=tuple(range(source.randrange(1 + len(tree)))),
        max_nodes=source.randrange(limits.MAX_TREE_NODES + 1),
        min_probability=source.random(),
        observation=observation,
    )


def draft_of(source: random.Random, name: str) -> Draft:
    tree = tree_of(source)
    if source.random() < 0.1:
        tree = replace(tree, proposals=(Proposal(token_ids=(1, 2), probabilities=(0.5, 0.5)),) * len(tree))
    return Draft(
        session_id=name,
        base_length=source.randrange(1 << 20),
        base_hash=source.getrandbits(64),
        assumed=(1, 2) if source.random() < 0.1 else (),
        tree=tree,
        group=source.choice(("", "text")),
        more=source.random() < 0.1,
        unready=source.random() < 0.1,
        drafting_s=source.random(),
    )


def calls_of(source: random.Random) -> list[DraftingCall]:
    others = (
        CloseSession(session_id="x"),
        OpenSession(session_id="x", tokens=(1,), prompt_length=1, sources=(), max_nodes=1),
    )
    return [
        source.choice(others) if source.random() < 0.1 else report_of(source, f"s{number}")
        for number in range(source.randrange(30))
    ]


def replies_of(source: random.Random) -> list[DraftingReply]:
    others = (DraftFailure(session_id="x", reason="none", reopen=True), Forgotten(forget_id=7))
    return [
        source.choice(others) if source.random() < 0.1 else draft_of(source, f"s{number}")
        for number in range(source.randrange(30))
    ]


def sent_of(source: random.Random, number: int) -> StepReport:
    """A report without hidden states and probes; a target may have told other numbers of likely ids after a node, or none."""
    while True:
        report = report_of(source, f"s{number}")
        seen = report.observation
        if seen is None:
            return report
        if seen.features is None and not seen.probe_ids:
            break
    fault = source.randrange(60)
    told = {
        0: ((), *seen.top_ids[1:]),
        1: ((),) * len(seen.top_ids),
        2: (*seen.top_ids, (1,)),
        3: (*seen.top_ids[:-1], (1,) * 4),
    }
    return replace(report, observation=replace(seen, top_ids=told.get(fault, seen.top_ids)))


@pytest.mark.parametrize("seed", range(80))
def test_reports_sent_by_columns_are_read_as_if_each_were_sent_alone(seed: int) -> None:
    source = random.Random(seed)
    reports = [sent_of(source, number) for number in range(source.randint(1, 12))]
    sent, numbers = SentReports.of(reports), [columns.numbers_of_report(report) for report in reports]
    found = columns.numbers_of_sent(sent)
    assert (found is None) == (None in numbers)
    assert found is None or found >= sum(number for number in numbers if number is not None)
    wires = [wire.SerializeToString() for wire in drafting.encode_drafting_calls([sent])]
    assert wires == [wire.SerializeToString() for wire in drafting.encode_drafting_calls(reports)]
    older = drafting.encode_drafting_calls([sent], columns=False)
    assert [call for wire in older for call in drafting.decode_drafting_calls(wire)] == reports


def in_one_array(report: StepReport) -> StepReport:
    """As a target has found it, where there are as many likely ids after each node."""
    seen = report.observation
    if seen is None or len({*map(len, seen.top_ids)}) != 1 or not seen.top_ids[0]:
        return report
    ids = IdRows(array("i", [each for row in seen.top_ids for each in row]), len(seen.top_ids[0]))
    return replace(report, observation=replace(seen, top_ids=ids))


def test_ids_in_one_array_equal_what_holds_equal_ones() -> None:
    rows = IdRows(array("i", [4, 5, 6, 7]), 2)
    assert rows == ((4, 5), (6, 7)) == (rows[0], rows[-1])
    assert rows[1:] == ((6, 7),) and len(rows) == 2
    for other in (((4, 5), (6, 8)), ((4, 5),), IdRows(rows.ids, 4), 7):
        assert rows != other


@pytest.mark.parametrize("seed", range(40))
def test_likely_ids_in_one_array_are_sent_as_tuples_are(seed: int) -> None:
    source = random.Random(seed)
    reports = [sent_of(source, number) for number in range(source.randint(1, 12))]
    held = [in_one_array(report) if source.random() < 0.8 else report for report in reports]
    assert held == reports
    sent = [SentReports.of(reports), SentReports.of(held)]
    assert columns.numbers_of_sent(sent[0]) == columns.numbers_of_sent(sent[1])
    for calls in ([sent[1]], held):
        wires = [wire.SerializeToString() for wire in drafting.encode_drafting_calls(calls)]
        assert wires == [wire.SerializeToString() for wire in drafting.encode_drafting_calls(reports)]


@pytest.mark.parametrize("seed", range(40))
def test_what_shares_messages_is_what_each_would_be_alone(seed: int) -> None:
    source = random.Random(seed)
    calls, replies = calls_of(source), replies_of(source)
    asked = [
        drafting_pb2.DraftRequest.FromString(wire.SerializeToString()) for wire in drafting.encode_drafting_calls(calls)
    ]
    assert [call for wire in asked for call in drafting.decode_drafting_calls(wire)] == calls
    told = [
        drafting_pb2.DraftResponse.FromString(wire.SerializeToString()) for wire in drafting.encode_drafting_replies(replies)
    ]
    read = [reply for wire in told for reply in drafting.decode_drafting_replies(wire)]
    assert read == replies
    assert [each.drafting_s for each in read if isinstance(each, Draft)] == [
        each.drafting_s for each in replies if isinstance(each, Draft)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_reports_are_read_as_columns_and_drafts_written_from_them(seed: int) -> None:
    source = random.Random(seed)
    reports = [report_of(source, f"s{number}") for number in range(12)]
    reports = [report for report in reports if columns.numbers_of_report(report) is not None]
    (wire,) = drafting.encode_drafting_calls(reports)
    read = drafting.decode_together(wire)
    assert isinstance(read, ReportColumns) and read.alone() == reports
    assert replace(read, session_ids=["other"] * len(read)).alone() == [
        replace(each, session_id="other") for each in reports
    ]
    trees = [EMPTY_TREE if each.observation is None else each.observation.tree for each in reports]
    tokens = [token for tree in trees for token in tree.tokens]
    assert [*read.tokens] == tokens and [*read.node_counts] == [*map(len, trees)]
    made = DraftColumns(
        left=(),
        session_ids=read.session_ids,
        base_lengths=read.lengths,
        base_hashes=read.prefix_hashes,
        node_counts=read.node_counts,
        tokens=read.tokens,
        parents=read.parents,
        sources=[source.randrange(len(NAMES)) for _ in tokens],
        source_names=NAMES,
        scores=[source.randrange(65) / 64 for _ in tokens],
        drafting_s=0.25,
        group="text",
    )
    (told,) = drafting.encode_drafting_replies([made])
    assert drafting.decode_drafting_replies(told) == made.alone()
    assert [each.drafting_s for each in made.alone()] == [0.25] * len(made)
    alone = drafting.encode_drafting_replies([made], columns=False)
    assert [*map(drafting.decode_drafting_reply, alone)] == made.alone()


@pytest.mark.parametrize(
    "column", ["committed", "accepted_paths", "max_nodes", "top_ids", "min_probabilities", "session_ids"]
)
def test_columns_that_do_not_fit_together_are_refused_as_ever(column: str) -> None:
    (wire,) = drafting.encode_drafting_calls([report_of(random.Random(3), f"s{number}") for number in range(4)][:1])
    if column == "session_ids":
        wire.steps.session_ids.append("x")
    else:
        setattr(wire.steps, column, getattr(wire.steps, column) + packed(KINDS.get(column, "I"), [1]))
    with pytest.raises(InvalidArgument):
        drafting.decode_together(wire)


def test_numbers_that_have_no_room_in_columns_come_one_by_one() -> None:
    report = replace(report_of(random.Random(1), "s"), observation=None, committed=(1 << 31,))
    (wire,) = drafting.encode_drafting_calls([report])
    assert drafting.decode_together(wire) == [report]


def test_the_reports_of_a_step_share_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [replace(report_of(random.Random(1), f"s{number}"), observation=None) for number in range(64)]
    assert len(list(drafting.encode_drafting_calls(plain))) == 1
    # What would be too large for one takes several.
    monkeypatch.setattr(drafting, "MOST_NUMBERS", 100)
    several = list(drafting.encode_drafting_calls(plain))
    assert len(several) > 1
    assert [call for wire in several for call in drafting.decode_drafting_calls(wire)] == plain


def test_the_largest_message_is_within_its_limit() -> None:
    tree = TokenTree(tokens=((1 << 32) - 1,) * 512, parents=tuple(range(-1, 511)), sources=("s",) * 512, scores=(0.5,) * 512)
    largest = StepReport(
        session_id="s" * 64,
        committed=tree.tokens,
        length=1,
        prefix_hash=2**64 - 1,
        accepted_path=tuple(range(512)),
        max_nodes=512,
        observation=Observation(tree=tree, top_ids=(((1 << 32) - 1,) * limits.MAX_TOP_IDS,) * 513),
    )
    sizes = [wire.ByteSize() for wire in drafting.encode_drafting_calls([largest] * 64)]
    assert len(sizes) > 1
    assert max(sizes) < limits.MAX_DRAFT_MESSAGE_BYTES


def test_a_message_of_too_many_drafts_is_refused_before_any_is_looked_at() -> None:
    """Each costs the verifier's loop some microseconds, also where its session is not there."""
    wire = drafting_pb2.DraftResponse()
    columns.write_drafts([Draft(session_id="s", base_length=1, base_hash=2, tree=EMPTY_TREE)] * 8192, wire.drafts)
    assert isinstance(drafting.decode_replies_together(wire), DraftColumns)
    columns.write_drafts([Draft(session_id="s", base_length=1, base_hash=2, tree=EMPTY_TREE)], wire.drafts)
    with refuses(InvalidArgument, field="drafts", value="8193 long"):
        drafting.decode_replies_together(wire)


def test_columns_that_do_not_fit_together_are_refused() -> None:
    wire = drafting_pb2.StepReports()
    columns.write_reports(SentReports.of([report_of(random.Random(seed), "s") for seed in (1, 2)]), wire)
    for name in ("session_ids", "lengths", "prefix_hashes", "max_nodes", "min_probabilities", "accepted_counts"):
        broken = drafting_pb2.StepReports.FromString(wire.SerializeToString())
        if name == "session_ids":
            del broken.session_ids[0]
        else:
            setattr(broken, name, getattr(broken, name)[array(KINDS.get(name, "I")).itemsize :])
        with pytest.raises(InvalidArgument, match="steps"):
            columns.read_reports(broken)
    wire.committed += packed("I", [7])
    with refuses(InvalidArgument, field="steps.committed"):
        columns.read_reports(wire)
    many = drafting_pb2.StepReports()
    columns.write_reports(SentReports.of([replace(report_of(random.Random(1), "s"), max_nodes=513)]), many)
    with refuses(InvalidArgument, field="steps.max_nodes"):
        columns.read_reports(many)


@pytest.mark.parametrize(
    ("count", "source", "name"), [(600, 0, "a"), (1, 3, "a"), (1, 0, "a" * 65)], ids=["nodes", "source", "name"]
)
def test_a_draft_that_breaks_a_limit_concerns_its_session_only(count: int, source: int, name: str) -> None:
    wire = drafting_pb2.Drafts()
    columns.write_drafts([Draft(session_id=name, base_length=1, base_hash=1) for name in ("good", "bad")], wire)
    changed = tree_pb2.TokenTrees(
        counts=packed("I", [0, count]),
        tokens=packed("I", [1] * count),
        parents=packed("i", [-1] * count),
        sources=packed("I", [source] * count),
        source_names=[name],
        score_counts=packed("I", [0, 0]),
    )
    wire.trees.CopyFrom(changed)
    good, bad = columns.read_drafts(wire)
    assert good == Draft(session_id="good", base_length=1, base_hash=1)
    assert isinstance(bad, DraftFailure)
    assert bad.session_id == "bad"


@pytest.mark.parametrize("column", ["committed", "prefix_hashes", "min_probabilities"])
def test_half_a_number_is_refused(column: str) -> None:
    (wire,) = drafting.encode_drafting_calls([report_of(random.Random(3), "s")])
    setattr(wire.steps, column, getattr(wire.steps, column) + b"\0")
    with refuses(InvalidArgument, field=f"steps.{column}"):
        drafting.decode_together(wire)


@pytest.mark.parametrize("tokens", [[-1], [1 << 32]])
def test_a_draft_of_no_tokens_that_could_be_is_not_sent(tokens: list[int]) -> None:
    wire = drafting_pb2.Drafts()
    for given in (tokens, array("q", tokens), *([array("i", tokens)] if tokens[0] < 0 else [])):
        tree = DraftColumns(
            left=(), session_ids=["s"], base_lengths=[1], base_hashes=[1], node_counts=[1], tokens=given, parents=[-1],
            sources=[0], source_names=("a",), scores=[0.5], drafting_s=0.1, group="text",
        )  # fmt: skip
        with pytest.raises(ValueError, match=r"negative|unsigned"):
            columns.write_draft_columns(tree, wire)


def test_numbers_of_another_kind_are_told_from_those_that_are_too_large() -> None:
    for numbers, error in (([0.5], TypeError), ([2**40], OverflowError)):
        with pytest.raises(error):
            array_of("i", numbers)
