"""One round of one cell: plain decoding, every strategy, and plain decoding again, all with the same requests."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import outrider
from benchmarks.never_slower.cells import PLAIN, GridCell, LoadTurn
from benchmarks.never_slower.kinds import CHANGING
from benchmarks.never_slower.load import LoadRecord, LoadShape, answer_all, keep_in_flight
from benchmarks.never_slower.requests import RoundRequests
from benchmarks.never_slower.same_answers import differences_from, longest_answers, unanswered
from benchmarks.never_slower.same_work import common_tokens, request_seconds, shared_tenths

# Kinds that a run with changing prompts sees.
CHANGES = 3
# What was cancelled leaves the server's batch before the next turn.
_SETTLE_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPlan:
    """How a round runs.

    Attributes:
        strategies: what is compared with plain decoding.
        seconds: how long a turn is measured; where kinds change, ``CHANGES`` times ``change_every_s`` instead.
        lead_s: longest time until all requests of a turn have begun to be answered.
    """

    strategies: tuple[str, ...]
    seconds: float
    lead_s: float = 60.0
    change_every_s: float = 30.0

    def seconds_of(self, cell: GridCell) -> float:
        """How long a turn in this cell is measured."""
        return CHANGES * self.change_every_s if cell.kind == CHANGING else self.seconds

    def order(self, repeat: int) -> tuple[str, ...]:
        """Who comes when: plain decoding first and last, and no strategy always behind the same one."""
        shift = repeat % len(self.strategies)
        return (PLAIN, *self.strategies[shift:], *self.strategies[:shift], PLAIN)


@dataclass(kw_only=True, slots=True)
class _Measured:
    strategy: str
    record: LoadRecord | None = None
    error: str = ""
    wrong: list[str] = field(default_factory=list)


async def measure_round(
    client: outrider.AsyncClient,
    requests: RoundRequests,
    cell: GridCell,
    repeat: int,
    plan: RoundPlan,
    advance: Callable[[], None] = lambda: None,
) -> list[LoadTurn]:
    """All turns of a round; a failed one says why.

    ``advance`` is called after each turn. The server's memory is emptied before each, so that no prompt is known.

    Raises:
        ConfigurationError: the prompts do not fit into the model's context.
    """
    requests.prepare(2 * cell.at_once + 2)
    measured = []
    for strategy in plan.order(repeat):
        measured.append(await _take_turn(client, requests, cell, strategy, plan))
        advance()
    try:
        await _compare(client, cell, measured)
    except outrider.OutriderError as error:
        for one in measured:
            one.error = one.error or f"plain decoding could not be asked for comparison: {error}"
    return [_as_turn(cell, repeat, place, measured) for place in range(len(measured))]


async def _take_turn(
    client: outrider.AsyncClient, requests: RoundRequests, cell: GridCell, strategy: str, plan: RoundPlan
) -> _Measured:
    shape = LoadShape(
        at_once=cell.at_once,
        strategy=strategy,
        temperature=cell.temperature,
        seconds=plan.seconds_of(cell),
        lead_s=plan.lead_s,
    )
    try:
        await client.forget()
        record = await keep_in_flight(client, requests.supply(plan.change_every_s), shape)
    except outrider.OutriderError as error:
        return _Measured(strategy=strategy, error=str(error))
    finally:
        await asyncio.sleep(_SETTLE_S)
    return _Measured(strategy=strategy, record=record)


async def _compare(client: outrider.AsyncClient, cell: GridCell, measured: Sequence[_Measured]) -> None:
    """Find wrong tokens. What only a strategy has answered, plain decoding answers now, untimed."""
    every = [answer for one in measured if one.record for answer in one.record.answers]
    reference = longest_answers(
        answer for one in measured if one.record and one.strategy == PLAIN for answer in one.record.answers
    )
    missing = unanswered(every, reference)
    for answer in await answer_all(client, missing, cell.at_once, PLAIN, cell.temperature):
        # At its limit it may have been cut to what there is to compare, and would have gone on.
        answer.finished = len(answer.tokens) < answer.request.max_tokens
        reference[answer.request.name] = answer
    for one in measured:
        if one.record:
            one.wrong = differences_from(reference, one.record.answers)


def _as_turn(cell: GridCell, repeat: int, place: int, measured: Sequence[_Measured]) -> LoadTurn:
    one = measured[place]
    record = one.record or LoadRecord(at_once=cell.at_once, began_s=0.0, seconds=0.0, tenths=(), answers=())
    plain = [other.record for other in measured if other.strategy == PLAIN and other.record and other is not one]
    tokens = common_tokens([record, *plain])
    return LoadTurn(
        cell=cell,
        repeat=repeat,
        turn=place,
        strategy=one.strategy,
        seconds=record.seconds,
        tenths=record.tenths,
        shared=shared_tenths(record, plain),
        work_s=request_seconds(record, tokens),
        plain_work_s=statistics.fmean([request_seconds(other, tokens) for other in plain] or [0.0]),
        ttft_s=record.ttft_s,
        answers=len(record.answers),
        wrong=tuple(one.wrong),
        error=one.error,
    )
