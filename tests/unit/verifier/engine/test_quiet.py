"""In quiet, drafters are told nothing: neither of requests that run, nor of those that begin and end meanwhile."""

from __future__ import annotations

from typing_extensions import override

from services.links.in_process import InProcessDraftLink
from speculation.columns import SentReports
from speculation.messages import CloseSession, DraftingCall, OpenSession, Progress, StepReport
from speculation.types import Plan
from tests.engine.fakes import PLAIN, VOCAB, RandomDrafter, ToyTarget, collect, decoding, request

PLAN = Plan(strategy="random", sources=("random",), max_nodes=4, observe_top_k=3)


class _Noted(InProcessDraftLink):
    """Notes every message."""

    def __init__(self) -> None:
        super().__init__(RandomDrafter(vocab=VOCAB))
        self.told: list[DraftingCall | SentReports] = []

    @override
    def _send(self, call: DraftingCall | SentReports) -> None:
        self.told.append(call)
        super()._send(call)


async def steps(events: object, count: int) -> list[int]:
    """The tokens of so many further steps."""
    tokens: list[int] = []
    for _ in range(count):
        event = await anext(events)  # type: ignore[call-overload]
        assert isinstance(event, Progress)
        tokens += event.token_ids
    return tokens


async def test_nothing_is_told_in_quiet() -> None:
    link = _Noted()
    async with decoding(ToyTarget(), link) as loop:
        expected, _, _ = await collect(loop, request("plain", [1, 2, 3], PLAIN, max_tokens=60, ignore_eos=True))
        before = loop.generate(request("before", [1, 2, 3], PLAN, max_tokens=60, ignore_eos=True))
        tokens = await steps(before, 3)
        loop._drafting.quiet = True
        told = len(link.told)
        assert {OpenSession, StepReport} <= {type(call) for call in link.told}
        tokens += await steps(before, 8)
        within, _, _ = await collect(loop, request("within", [1, 2, 3], PLAN, max_tokens=20, ignore_eos=True))
        assert within == expected[:20]
        assert not link.told[told:]
        loop._drafting.quiet = False
        async for event in before:
            tokens += event.token_ids if isinstance(event, Progress) else ()
        assert tokens == expected
        after = link.told[told:]
        # The session that was open goes on, with all that it missed in one report.
        assert isinstance(after[0], StepReport) and len(after[0].committed) >= 8
        assert {call.session_id for call in after if not isinstance(call, CloseSession)} == {"before"}
