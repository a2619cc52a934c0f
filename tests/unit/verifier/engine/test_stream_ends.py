"""Which rows of a pass have streams."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from typing_extensions import override

from services.links.in_process import InProcessDraftLink
from services.verifier.engine.deciding.asking import Pace, Prices
from services.verifier.engine.deciding.stream_ends import MOST_ENDS, choose_ends
from services.verifier.model.target_port import Rows, StreamSpec
from speculation.tree import ROOT, likely_ends
from speculation.types import EMPTY_TREE, Plan, TokenTree
from tests.engine.fakes import PLAIN, RandomDrafter, ToyTarget, collect, request
from tests.engine.simulated import decoding, simulated

# 0 and 3 hang on the root, 1 and 2 on 0.
TREE = TokenTree(tokens=(1, 2, 3, 4), parents=(-1, 0, 0, -1), sources=("s",) * 4)
CHANCES = [0.6, 0.3, 0.2, 0.1]
STREAMS = StreamSpec(rows=4, share=0.2, most_rows=128)
# A row is cheap beside a pass.
CHEAP = Prices(pass_s=0.030, row_s=0.001, requests=1)


class Streaming(ToyTarget):
    """A target with streams, which notes the ends of its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[tuple[int, ...]] = []

    @override
    def streams(self, layers: Sequence[int]) -> StreamSpec | None:
        return STREAMS if 30 in layers else None

    @override
    def begin(self, batch: Sequence[Rows]) -> None:
        super().begin(batch)
        for rows in batch:
            self.ends.append(rows.ends)
            assert all(len(rows.tokens) - rows.logits <= end < len(rows.tokens) for end in rows.ends)
            most = rows.context + len(rows.tokens) + STREAMS.rows * len(rows.ends)
            assert self.granted[rows.request_id] >= most, "streams beyond the request's room"


async def passes(plan: Plan) -> tuple[Streaming, list[int]]:
    target = Streaming()
    async with decoding(target, InProcessDraftLink(RandomDrafter(mood="good"))) as loop:
        tokens, _, _ = await collect(loop, request("r", [1, 2, 3], plan, max_tokens=20, ignore_eos=True))
    return target, tokens


@simulated
async def test_rows_of_the_plan_s_requests_have_streams() -> None:
    _, plain = await passes(PLAIN)
    plan = Plan(strategy="any", sources=("random", "streaming"), max_nodes=6, observe_layers=(30, 31))
    target, tokens = await passes(plan)
    assert tokens == plain
    assert all(1 <= len(ends) <= MOST_ENDS for ends in target.ends) and max(map(len, target.ends)) > 1
    # Others' plans want the same layers, and no streams.
    others, tokens = await passes(replace(plan, sources=("random",)))
    assert tokens == plain and not any(others.ends)


@simulated
async def test_steps_after_which_nobody_drafts_have_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = itertools.cycle([False, False, True])
    monkeypatch.setattr(Pace, "expects", property(lambda pace: next(steps)))
    plan = Plan(strategy="any", sources=("random", "streaming"), max_nodes=6, observe_layers=(30, 31))
    target, _ = await passes(plan)
    having = [bool(ends) for ends in target.ends]
    assert any(having) and not any(first and second for first, second in itertools.pairwise(having))


def test_a_path_ends_where_no_child_goes_on() -> None:
    ends = likely_ends(TREE.parents, CHANCES)
    assert [chance for _, chance in ends] == sorted((chance for _, chance in ends), reverse=True)
    assert dict(ends) == pytest.approx({ROOT: 0.3, 0: 0.1, 1: 0.3, 2: 0.2, 3: 0.1})
    assert sum(chance for _, chance in ends) == pytest.approx(1.0)


def test_without_a_tree_the_path_ends_at_the_root() -> None:
    assert likely_ends([], []) == [(ROOT, 1.0)]
    assert choose_ends(EMPTY_TREE, [], STREAMS, 0.5, CHEAP) == (ROOT,)


def test_streams_must_be_worth_their_rows() -> None:
    # A draft of one token gains 29 ms; an end's streams cost 0.8 ms, so that a chance of 0.03 is enough.
    assert choose_ends(TREE, CHANCES, STREAMS, 1.0, CHEAP) == (ROOT, 1, 2)
    # Of a tenth of a token, a chance of 0.28 is.
    assert choose_ends(TREE, CHANCES, STREAMS, 0.1, CHEAP) == (ROOT, 1)
    assert choose_ends(TREE, CHANCES, STREAMS, 0.0, CHEAP) == ()


def test_beside_two_steps_they_save_a_reading_of_their_layers() -> None:
    # 6 of 30 ms, of which 0.8 ms for one end are worth a chance of 0.13.
    both = StreamSpec(rows=4, share=0.2, most_rows=128, two_steps=True)
    assert choose_ends(TREE, CHANCES, both, 1.0, CHEAP) == (ROOT, 1, 2)
    dear = Prices(pass_s=0.030, row_s=0.002, requests=1)
    assert choose_ends(TREE, CHANCES, both, 1.0, dear) == (ROOT, 1)
    assert choose_ends(TREE, CHANCES, STREAMS, 1.0, dear) == (ROOT, 1, 2)


def test_where_a_row_costs_as_much_as_a_pass_per_request_there_are_none() -> None:
    assert choose_ends(TREE, CHANCES, STREAMS, 2.0, Prices(pass_s=0.030, row_s=0.001, requests=64)) == ()


def test_where_time_does_not_count_there_are_as_many_as_may_be() -> None:
    assert len(choose_ends(TREE, CHANCES, STREAMS, 0.0, None)) == MOST_ENDS


@pytest.mark.parametrize(("most", "count"), [(4, 0), (8, 1), (12, 2)])
def test_tree_and_streams_stay_within_a_request_s_rows(most: int, count: int) -> None:
    streams = StreamSpec(rows=4, share=0.2, most_rows=most)
    assert len(choose_ends(TREE, CHANCES, streams, 1.0, None)) == count
