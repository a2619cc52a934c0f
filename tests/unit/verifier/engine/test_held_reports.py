"""Several steps in one report: sources learn from it what they would have learnt from each."""

from __future__ import annotations

import random

import pytest

from services.drafter.config import DrafterConfig
from services.drafter.sessions.text_group import TextGroup
from services.links.codec.drafting import decode_drafting_call, encode_drafting_call
from services.verifier.engine.held_reports import HeldReports, joined
from speculation import limits
from speculation.messages import OpenSession, StepReport
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.sources import SOURCES
from speculation.tree import validate
from speculation.types import Features, Observation, TokenTree
from tests.engine.fakes import random_tree

VOCAB = 12
PROMPT = (3, 1, 4, 1, 5)


def steps(count: int, *, seed: int = 0, top_k: int = 3) -> list[StepReport]:
    """Reports of steps over random trees, with the ids that a made-up target finds likely."""
    numbers = random.Random(seed)
    found: list[StepReport] = []
    tokens = PROMPT
    for _ in range(count):
        tree = random_tree(numbers, 6, VOCAB)
        path = _path(tree, numbers)
        committed = (*(tree.tokens[node] for node in path), numbers.randrange(VOCAB))
        ids = tuple(_likely(token, top_k) for token in (tokens[-1], *tree.tokens))
        tokens = (*tokens, *committed)
        found.append(
            StepReport(
                session_id="s",
                committed=committed,
                length=len(tokens),
                prefix_hash=extend_hash(EMPTY_HASH, tokens),
                accepted_path=path,
                max_nodes=8,
                observation=Observation(tree=tree, top_ids=ids) if top_k else None,
            )
        )
    return found


def _path(tree: TokenTree, numbers: random.Random) -> tuple[int, ...]:
    node = numbers.randrange(-1, len(tree))
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = tree.parents[node]
    return tuple(path)


def _likely(token: int, top_k: int) -> tuple[int, ...]:
    return tuple(random.Random(token).sample(range(VOCAB), top_k))


def all_of(reports: list[StepReport]) -> StepReport:
    held = HeldReports()
    for report in reports:
        assert held.fits(report)
        held.add(report, None)
    features, report = held.take()
    assert not list(features)
    assert not held
    return report


def test_it_is_the_report_of_one_larger_tree() -> None:
    each = steps(5)
    report = all_of(each)
    assert report.observation is not None
    tree = report.observation.tree
    validate(tree, vocab_size=VOCAB, max_nodes=limits.MAX_TREE_NODES)
    assert report.committed == tuple(token for one in each for token in one.committed)
    assert (report.length, report.prefix_hash) == (each[-1].length, each[-1].prefix_hash)
    assert tuple(tree.tokens[node] for node in report.accepted_path) == report.committed[:-1]
    assert [tree.parents[node] for node in report.accepted_path] == [-1, *report.accepted_path[:-1]]
    assert len(report.observation.top_ids) == len(tree) + 1
    # After each token, the ids that its own step has found.
    apart = [one.observation.top_ids[node + 1] for one in each if one.observation for node in (-1, *one.accepted_path)]
    assert [report.observation.top_ids[node + 1] for node in (-1, *report.accepted_path)] == apart
    assert decode_drafting_call(encode_drafting_call(report)) == report


def test_probes_keep_their_ids() -> None:
    first, second = steps(2)
    probed = TokenTree(tokens=(7, 8), parents=(-1, 0), sources=("x", "x"), probes=(0, 1))
    told = ((0.5,), ())
    seen = Observation(tree=probed, top_ids=((1,), (2,), (3,)), probe_ids=((2,), (3,)), probe_chances=told)
    second = StepReport(
        session_id="s", committed=(9,), length=second.length, prefix_hash=0, accepted_path=(), max_nodes=0, observation=seen
    )
    found = joined([first, second]).observation
    assert found is not None
    assert [found.tree.tokens[node] for node in found.tree.probes] == [7, 8]
    assert found.probe_ids == tuple(found.top_ids[node + 1] for node in found.tree.probes)
    assert found.probe_chances == told


def test_without_observations_the_path_is_as_long_as_the_tokens() -> None:
    report = all_of(steps(4, top_k=0))
    assert report.observation is None
    assert len(report.accepted_path) == len(report.committed) - 1
    assert sorted(set(report.accepted_path)) == list(report.accepted_path)


@pytest.mark.parametrize("name", [name for name, spec in SOURCES.items() if spec.kind == "text" and not spec.retrieval])
def test_a_source_drafts_the_same_after_it(name: str) -> None:
    for seed in range(8):
        each = steps(9, seed=seed)
        drafts = []
        for reports in (each, [each[0], all_of(each[1:4]), all_of(each[4:])]):
            opening = OpenSession(
                session_id="s", tokens=PROMPT, prompt_length=len(PROMPT), sources=(name,), max_nodes=8, tenant="t"
            )
            session = TextGroup(DrafterConfig()).open(opening, (name,))
            for report in reports:
                session.observe(report)
            drafts.append((session.draft(8).tokens, session.draft(8).parents))
        assert drafts[0] == drafts[1]


def test_what_does_not_fit_into_a_message_is_not_joined() -> None:
    held = HeldReports()
    for report in steps(1000):
        if not held.fits(report):
            break
        held.add(report, None)
    _, report = held.take()
    assert len(report.accepted_path) > 100
    decode_drafting_call(encode_drafting_call(report))


def test_hidden_states_come_with_it_in_order() -> None:
    held, each = HeldReports(), steps(3, top_k=0)
    at = 0
    for report in each:
        rows = len(report.committed)
        held.add(report, Features(data=bytes(2 * rows), rows=rows, width=1, dtype="float16", start=at))
        at += rows
    first, report = held.take()
    assert not list(first)
    assert report.observation is not None
    assert report.observation.features is not None
    assert (report.observation.features.start, report.observation.features.rows) == (0, at)
