"""Requests that want one token of a pass and nothing else go through it together.

A ``Part`` holds whatever a request may want of a pass. Plain requests need less, so they lie in columns: there is no part,
no verdict and no outcome for each. The results are those that their parts would have had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import compress

from services.verifier.engine.live_request import LiveRequest
from services.verifier.model.target_port import NOT_CHOSEN, Outcome, SingleOutcomes, SingleRows
from speculation.costs import Load
from speculation.errors import Internal
from speculation.types import FinishReason


class Singles:
    """What these requests have of one pass.

    Args:
        requests: only the pending token of each is left to compute.

    Attributes:
        rows: what the target computes; ``load``: the same as a load.
        tokens: chosen after the pending ones; from ``decide`` on.
        ended: those whose answer ends with its token, and why.
        failed: those after whose pending token none was chosen, and why; they are no longer in ``requests`` and ``rows``.
        saved_s: as in ``Part``, for each of them.
    """

    __slots__ = ("ended", "failed", "load", "requests", "rows", "saved_s", "tokens")

    def __init__(self, requests: list[LiveRequest]) -> None:
        self.requests = requests
        self.tokens: list[int] = []
        self.ended: list[tuple[LiveRequest, FinishReason]] = []
        self.failed: list[tuple[LiveRequest, Exception]] = []
        self.saved_s = 0.0
        self.rows = _rows_of(requests)
        count, keys = len(requests), sum(self.rows.contexts)
        self.load = Load(rows=count, requests=count, keys=keys, row_keys=keys)

    def __len__(self) -> int:
        return len(self.requests)

    def by_strategy(self) -> dict[str, int]:
        """How many there are of each strategy."""
        return Counter([request.strategy for request in self.requests])

    def decide(self, outcomes: Sequence[Outcome]) -> None:
        """Note the tokens that the target chose, and which answers they end."""
        if isinstance(outcomes, SingleOutcomes):
            self.tokens = outcomes.choices
        else:
            self.tokens = [outcome.choices[0] for outcome in outcomes]
        if NOT_CHOSEN in self.tokens:
            self._leave_out(outcomes)
        rows, tokens = self.rows, self.tokens
        # An answer is as long as its request computes, the pending token, and the new one.
        self.ended = [
            (request, reason)
            for request, context, token in zip(self.requests, rows.contexts, tokens, strict=True)
            if (token in request.stop_ids or context + 2 >= request.full_at) and (reason := request.reason_to_end(token))
        ]

    def _leave_out(self, outcomes: Sequence[Outcome]) -> None:
        """Put those without a token into ``failed``."""
        self.failed = [
            (request, nothing_chosen(outcome))
            for request, outcome, token in zip(self.requests, outcomes, self.tokens, strict=True)
            if token == NOT_CHOSEN
        ]
        chosen = [token != NOT_CHOSEN for token in self.tokens]
        self.requests, self.tokens = [*compress(self.requests, chosen)], [*compress(self.tokens, chosen)]
        self.rows = _rows_of(self.requests)


def _rows_of(requests: Sequence[LiveRequest]) -> SingleRows:
    contexts, pending = [each.computed for each in requests], [each.tokens[-1] for each in requests]
    return SingleRows([each.id for each in requests], contexts, pending)


def nothing_chosen(outcome: Outcome) -> Exception:
    """Why the target chose nothing after a row that its choices lead to."""
    return outcome.error or Internal("the target chose nothing after a row that its choices lead to")


def singled_out(requests: Sequence[LiveRequest]) -> tuple[Singles, list[LiveRequest]]:
    """Those of a pass's requests that go together, and the others."""
    single = [request.single and request.computed == len(request.tokens) - 1 for request in requests]
    if all(single):
        return Singles([*requests]), []
    return Singles([*compress(requests, single)]), [*compress(requests, [not each for each in single])]
