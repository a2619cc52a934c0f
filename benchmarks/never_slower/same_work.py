"""Compares turns by the same work: the time of the tokens that both have, whatever else one of them reached.

In a turn of fixed length the faster contestant gets to prompts that the other never sees. A long one among them would make
it look slow, and equal turns of plain decoding, which see the same prompts, would not show that as noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.never_slower.load import TENTH_S, LoadAnswer, LoadRecord


def common_tokens(records: Sequence[LoadRecord]) -> dict[str, int]:
    """Tokens that all have of a request, by its name; requests of which one has none are left out."""
    counts = [{answer.request.name: len(answer.tokens) for answer in record.answers} for record in records]
    least = {name: min(count.get(name, 0) for count in counts) for name in (counts[0] if counts else ())}
    return {name: count for name, count in least.items() if count}


def request_seconds(record: LoadRecord, tokens: Mapping[str, int]) -> float:
    """Seconds from sending each request to its token number ``tokens[name]``, summed over the requests.

    The first requests all come at once, before the load is measured: of them, seconds count from their first token.
    """
    opening = {answer.request.name for answer in record.answers[: record.at_once]}
    return sum(
        _seconds_to(answer, tokens[answer.request.name]) - (answer.arrivals[0][0] if answer.request.name in opening else 0.0)
        for answer in record.answers
        if answer.request.name in tokens
    )


def shared_tenths(record: LoadRecord, plain: Sequence[LoadRecord]) -> int:
    """Tenths of a second before the contestant begins a request of which plain decoding never had a token."""
    known = {answer.request.name for one in plain for answer in one.answers if answer.tokens}
    new = [answer.sent_s - record.began_s for answer in record.answers if answer.request.name not in known]
    return max(0, min([len(record.tenths), *(int(seconds / TENTH_S) for seconds in new)]))


def _seconds_to(answer: LoadAnswer, count: int) -> float:
    """Seconds from sending the request to its ``count``-th token, which it has."""
    return next(seconds for seconds, so_far in answer.arrivals if so_far >= count)
