"""One round of one cell: all contestants take their turns, and every answer is compared with plain decoding's."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import outrider
from benchmarks.never_slower.cells import PLAIN, GridCell, LoadTurn
from benchmarks.never_slower.load import LoadRecord, answer_all
from benchmarks.never_slower.requests import RoundRequests
from benchmarks.never_slower.same_answers import differences_from, longest_answers, unanswered
from benchmarks.never_slower.same_work import common_tokens, request_seconds, shared_tenths
from benchmarks.never_slower.turns import Contestants, Measured, RoundPlan


async def measure_round(
    contestants: Contestants,
    requests: RoundRequests,
    cell: GridCell,
    repeat: int,
    plan: RoundPlan,
    advance: Callable[[], None] = lambda: None,
) -> list[LoadTurn]:
    """All turns of a round; a failed one says why. ``advance`` is called once for each contestant.

    Raises:
        ConfigurationError: the prompts do not fit into the model's context.
    """
    requests.prepare(2 * cell.at_once + 2)
    measured = await contestants.take_turns(requests, cell, repeat, plan, advance)
    try:
        await _compare(contestants.clients[0], cell, measured)
    except outrider.OutriderError as error:
        for one in measured:
            one.error = one.error or f"plain decoding could not be asked for comparison: {error}"
    return [_as_turn(cell, repeat, place, measured) for place in range(len(measured))]


async def _compare(client: outrider.AsyncClient, cell: GridCell, measured: Sequence[Measured]) -> None:
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


def _as_turn(cell: GridCell, repeat: int, place: int, measured: Sequence[Measured]) -> LoadTurn:
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
