"""What the demo shows of recorded answers, and its lying drafter."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

import outrider
from cli.demo import side_by_side
from cli.demo.lying import LyingLink
from cli.demo.recording import Pairs, Recording, differing
from speculation.errors import MalformedTree
from speculation.messages import Draft, DraftFailure, DraftingReply
from speculation.tree import validate
from speculation.types import TokenTree

TEXT, SOURCES = ("def ", "add", "(a, b)"), ("target", "suffix", "suffix")


def recording(*arrivals: tuple[float, int], tokens: tuple[int, ...] = (1, 2, 3)) -> Recording:
    result: Any = outrider.Generation.__new__(outrider.Generation)
    given = {
        "text": "".join(TEXT),
        "token_ids": tokens,
        "origins": tuple(
            outrider.TokenOrigin(source=source, text_length=len(text)) for text, source in zip(TEXT, SOURCES, strict=True)
        ),
    }
    for name, value in given.items():
        object.__setattr__(result, name, value)
    return Recording(result=result, arrivals=arrivals)


def test_what_had_come_by_a_moment() -> None:
    answer = recording((0.5, 1), (1.5, 3))
    assert [answer.at(seconds) for seconds in (0.4, 0.5, 1.4, 9.0)] == [(0, 0), (1, 1), (1, 1), (3, 2)]
    assert list(answer.spans(2)) == [("def ", "target"), ("add", "suffix")]
    assert "".join(text for text, _ in answer.spans(3)) == answer.result.text
    assert (answer.seconds, answer.longest_gap) == (1.5, 1.0)


def test_tokens_that_differ_are_counted() -> None:
    assert differing((1, 2, 3), (1, 2, 3)) == 0
    assert differing((1, 2, 3), (1, 9)) == 2
    plain, same, wrong = recording((2.0, 3)), recording((1.0, 3)), recording((1.0, 3), tokens=(1, 2, 4))
    pairs = Pairs(plain=(plain, plain), ours=(same, wrong))
    assert (pairs.ratios, pairs.differ) == ((2.0, 2.0), 1)


def test_both_answers_are_shown_whole() -> None:
    console = Console(width=100, record=True, force_terminal=False)
    side_by_side.show(console, recording((1.0, 1), (2.0, 2), (3.0, 3)), recording((1.0, 1), (1.5, 3)))
    shown = console.export_text()
    assert shown.count("def add(a, b)") == 2
    assert "3.00 s" in shown and "1.50 s" in shown
    assert "suffix 2" in shown


class Heard:
    """A link's receiver that keeps what comes; and an honest link, as far as the lie needs one."""

    connected = True
    open = step = steps = features = close = forget = stop = staticmethod(lambda *_: None)

    def __init__(self) -> None:
        self.replies: list[DraftingReply] = []

    async def start(self, receiver: Any) -> None:
        receiver.on_connected()
        for base in range(6):
            receiver.on_reply(Draft(session_id="s", base_length=base, base_hash=0))
        receiver.on_reply(DraftFailure(session_id="s", reason="r"))

    def on_connected(self) -> None: ...

    def on_reply(self, reply: DraftingReply) -> None:
        self.replies.append(reply)


@pytest.mark.parametrize("lies", [False, True])
async def test_lies_are_well_formed_trees_or_none(lies: bool) -> None:
    heard: Any = Heard()
    link = LyingLink(heard)
    link.lies = lies
    await link.start(heard)
    *drafts, failure = heard.replies
    assert isinstance(failure, DraftFailure)
    assert link.told == (6 if lies else 0)
    refused = 0
    for base, draft in enumerate(drafts):
        assert draft.base_length == base
        assert (draft.tree == TokenTree()) is not lies
        try:
            validate(draft.tree, vocab_size=1000, max_nodes=64, sources=("suffix",))
        except MalformedTree:
            refused += 1
    assert refused == (2 if lies else 0)
