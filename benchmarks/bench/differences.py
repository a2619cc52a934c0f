"""Compares every answer with plain decoding and with transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.bench.measure import requests_of
from benchmarks.bench.records import Cell, Request

# Logits closer than this are a near tie: which one is larger depends on the order of summation in float32 (the largest
# difference measured between two orders was 6e-5).
_NEAR = 3e-4

Answers = Mapping[str, tuple[int, ...]]
# (tokens before, the two token ids) -> {"logits": [..]}
Logits = Callable[[Sequence[int], Sequence[int]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first difference between an answer and its reference. A token is None where the answer has ended.

    Attributes:
        times: in how many cells it occurred.
        logits: the target's logits of the two tokens at that position.
    """

    contestant: str
    against: str
    request: str
    position: int
    token: int | None
    reference_token: int | None
    times: int = 1
    logits: tuple[float, ...] | None = None

    @property
    def near_tie(self) -> bool | None:
        """Whether the two logits are almost equal; None: unknown."""
        if self.logits is None or len(self.logits) < 2:
            return None
        return abs(self.logits[0] - self.logits[1]) <= _NEAR


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One contestant against one reference, over all of its cells."""

    contestant: str
    against: str
    equal: int
    answers: int

    @property
    def lossless(self) -> bool:
        """Whether not a single token differs."""
        return self.equal == self.answers


def answers_by_request(cells: Iterable[Cell], requests: Sequence[Request]) -> tuple[dict[str, tuple[int, ...]], list[Cell]]:
    """The first answer to each request, and the cells that they come from."""
    found: dict[str, tuple[int, ...]] = {}
    used: list[Cell] = []
    for cell in cells:
        answers = zip(requests_of(requests, cell.task), cell.outcome.answers, strict=True)
        new = {request.id: answer.tokens for request, answer in answers if request.id not in found}
        found.update(new)
        used += [cell] if new else []
    return found, used


def check(
    cells: Sequence[Cell], requests: Sequence[Request], against: str, reference: Answers
) -> tuple[list[Check], list[Difference]]:
    """Compare all cells with the reference answers; requests without one are skipped."""
    equal: dict[str, int] = {}
    total: dict[str, int] = {}
    differences: dict[tuple[Any, ...], Difference] = {}
    for cell in cells:
        for request, answer in zip(requests_of(requests, cell.task), cell.outcome.answers, strict=True):
            expected = reference.get(request.id)
            if expected is None:
                continue
            total[cell.contestant] = total.get(cell.contestant, 0) + 1
            if answer.tokens == expected:
                equal[cell.contestant] = equal.get(cell.contestant, 0) + 1
                continue
            found = _difference(cell.contestant, against, request, answer.tokens, expected)
            key = (found.contestant, found.request, found.position, found.token)
            seen = differences.get(key)
            differences[key] = found if seen is None else replace(seen, times=seen.times + 1)
    checks = [Check(contestant=c, against=against, equal=equal.get(c, 0), answers=n) for c, n in total.items()]
    return checks, list(differences.values())


def explain(
    found: Iterable[Difference], requests: Sequence[Request], reference: Answers, logits: Logits
) -> list[Difference]:
    """Add the target's logits to every difference between two tokens."""
    by_key = {request.id: request for request in requests}
    explained = []
    for difference in found:
        if difference.token is not None and difference.reference_token is not None:
            before = [*by_key[difference.request].prompt, *reference[difference.request][: difference.position]]
            reply = logits(before, [difference.token, difference.reference_token])
            difference = replace(difference, logits=tuple(reply["logits"]))
        explained.append(difference)
    return explained


def as_object(difference: Difference) -> dict[str, Any]:
    """The JSON object for results.json."""
    return asdict(difference) | {"near_tie": difference.near_tie}


def _difference(
    contestant: str, against: str, request: Request, ours: tuple[int, ...], expected: tuple[int, ...]
) -> Difference:
    common = min(len(ours), len(expected))
    at = next((i for i in range(common) if ours[i] != expected[i]), common)
    return Difference(
        contestant=contestant,
        against=against,
        request=request.id,
        position=at,
        token=ours[at] if at < len(ours) else None,
        reference_token=expected[at] if at < len(expected) else None,
    )
