"""Decides which of its plan's costly sources draft for a request (docs/decisions.md). Uses no clock.

A source is costly if a model runs for it, perhaps on the target's own cores, or if it reads hidden states or an index. It
slows steps down, whether or not its drafts are accepted. Its gain is known exactly, since drafts change no text: the tokens
accepted beyond those of the other drafts at hand. Its cost is measured: how much longer a step takes while requests use it,
from the end of one pass to the end of the next. A source that costs more than it gains is left out. It is told nothing, and
the passes compute nothing for it.

A source is tried in the first request, and given up there as soon as it proves too costly. It is tried again in one request
of 16, of 32 and so on, after an hour, or at a new load. If it pays, one request of 32 goes without it, so its cost stays
known.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.verifier.engine.deciding.cost_slope import CostSlope
from services.verifier.engine.deciding.source_use import Brought, Use
from services.verifier.engine.live_request import LiveRequest
from speculation.sources import AUTO, SOURCES
from speculation.tree import ROOT, children
from speculation.types import Plan, TokenTree

# Requests from one hopeless trial to the next, doubled up to the second number. After so many seconds one is due anyway.
_TRY_EVERY, _TRY_AT_LEAST_EVERY, _TRY_AFTER_S = 16, 256, 3600.0
# Where a source pays, one request in so many goes without it.
_WITHOUT_EVERY = 32
# A use is judged every so many steps: after so many drafts have come, or so many steps without them.
_JUDGE_EVERY, _FEWEST_DRAFTS, _MOST_SILENT = 8, 2, 24
# While the cost is unknown, a trial ends after so many steps unless the source doubles the tokens.
_FIRST_TRIAL = 16
# A source is taken in only if steps yield so many times the tokens per second with it: a smaller gain is within the noise.
_LEAST_GAIN = 1.03
# A pass counts as at most so many times slower than the average. So few passes that differ make the cost known: a model
# slows a pass by much, and each of them costs time.
_MOST_SLOWER, _KNOWN = 4.0, 3.0


# The gain of a source depends on whether the target samples, and on the prompt's length (rounded to a power of two).
_Kind = tuple[bool, int]


def _kind(request: LiveRequest) -> _Kind:
    return request.message.sampling.temperature > 0, len(request.message.prompt).bit_length()


class Record:
    """What one costly source gains and costs, over all requests."""

    def __init__(self) -> None:
        self.cost = CostSlope(_MOST_SLOWER, known=_KNOWN)
        self.trials = 0
        self._all = Brought()
        self._by_kind: dict[_Kind, Brought] = {}
        self._every, self._since, self._tried_at = _TRY_EVERY, 0, 0.0
        self._loads: set[int] = set()
        self._alternate = False

    def brought(self, kind: _Kind) -> Brought:
        """The tokens that it brought to requests of a kind."""
        return self._by_kind.setdefault(kind, Brought())

    def speed(self, share: float, requests: int) -> float:
        """Tokens per second with the source in one of ``requests``, over those without it.

        Args:
            share: extra tokens that it brings, for each other one.
        """
        return (1.0 + share / requests) / self._slower(requests)

    def _slower(self, requests: int) -> float:
        step_s = self.cost.without_s(requests)
        return 1.0 + self.cost.seconds / step_s if step_s else 1.0

    def decide(self, kind: _Kind, requests: int, now: float, *, may_try: bool) -> Use | None:
        """Whether the next request uses the source.

        Args:
            requests: decoded at once, this one included.
            now: seconds.
            may_try: whether a trial is possible. Two in one request would say little about either.
        """
        self._since += 1
        pays = self.speed(self.brought(kind).share(self._all), requests) > _LEAST_GAIN
        if pays and self.cost.known:
            self._every = _TRY_EVERY
            return None if self._since % _WITHOUT_EVERY == 0 else Use(trial=False)
        if pays:
            # Requests with it and without it, in turn, show what it costs.
            self._alternate = not self._alternate
            return Use(trial=True) if self._alternate and may_try else None
        return self._trial(requests, now) if may_try else None

    def _trial(self, requests: int, now: float) -> Use | None:
        new = requests.bit_length() not in self._loads and self._since > len(self._loads)
        if self.trials or not (self._since >= self._every or now - self._tried_at > _TRY_AFTER_S or new):
            return None
        if self._loads:
            self._every = min(_TRY_AT_LEAST_EVERY, 2 * self._every)
        self._loads.add(requests.bit_length())
        self._since, self._tried_at = 0, now
        return Use(trial=True)

    def hopeless(self, use: Use, kind: _Kind, requests: int) -> bool:
        """Whether a request should use the source no longer."""
        if use.steps % _JUDGE_EVERY or not use.steps or (use.drafts < _FEWEST_DRAFTS and use.steps < _MOST_SILENT):
            return False
        if use.trial and not self.cost.known:
            return not use.brought.part or (use.steps >= _FIRST_TRIAL and use.brought.share() < 1.0)
        # A trial counts by itself: the gain may have changed.
        share = use.brought.share(None if use.trial else self.brought(kind))
        return self.speed(share, requests) < 1.0

    def ended(self, use: Use, kind: _Kind) -> None:
        """Learn from a use that has ended."""
        self.brought(kind).learn(use.brought.part, use.brought.whole)
        self._all.learn(use.brought.part, use.brought.whole)
        self.trials -= use.trial

    def why(self, kind: _Kind, requests: int) -> str:
        """Its gain and cost, for the answer's report."""
        more, slower = self.brought(kind).share(self._all), self._slower(requests) - 1.0
        return f"{100 * more:.0f} % more tokens, steps {100 * slower:.0f} % longer"


class CostlySources:
    """Decides for all requests of one loop.

    Args:
        choices: counts its decisions, by source and reason.
    """

    def __init__(self, choices: dict[str, dict[str, int]]) -> None:
        self._choices = choices
        self._records: dict[str, Record] = {}

    def begin(self, request: LiveRequest, requests: int, now: float) -> None:
        """Choose the sources of a request that begins.

        Args:
            requests: decoded at once, this one included.
            now: seconds.
        """
        for name in costly(request.message.plan):
            record = self._records.setdefault(name, Record())
            tried = any(use.trial for use in request.used.values())
            use = record.decide(_kind(request), requests, now, may_try=not tried)
            if use is None:
                self._leave_out(request, name, requests, "too_costly")
            else:
                self._count(name, "trial" if use.trial else "pays")
                record.trials += use.trial
                request.used[name] = use

    def learn_pass(self, batch: Sequence[LiveRequest], seconds: float, *, idle: bool) -> None:
        """Learn the cost of sources from a pass without prompts.

        Args:
            seconds: from the end of the pass before to its end.
            idle: nobody drafted meanwhile.
        """
        for name, record in self._records.items():
            units = 0 if idle else sum(name in request.used for request in batch)
            mean_s = record.cost.without_s(len(batch)) or seconds
            record.cost.learn(requests=len(batch), units=units, seconds=seconds, pass_s=mean_s)

    def learn_step(self, request: LiveRequest, committed: Sequence[int], accepted: int) -> None:
        """Learn the gain of a request's sources from a step, before it is committed.

        Args:
            committed: the step's tokens; the first ``accepted`` of them had been drafted.
        """
        for name, use in request.used.items():
            reached = 0
            if accepted:
                others = (each.tree for each in request.drafts() if each.draft.group != name)
                reached = max((reach(tree, committed[:accepted], name) for tree in others), default=0)
            use.steps += 1
            use.brought.learn(accepted - reached, len(committed) - (accepted - reached))
            model = SOURCES[name].kind == "model"
            use.drafts = sum(box.received[name] if model else box.received.total() for box in request.mailboxes.values())

    def given_up(self, request: LiveRequest, requests: int) -> tuple[str, ...]:
        """Give up the request's hopeless sources. Returns their names."""
        kind = _kind(request)
        gone = [name for name, use in request.used.items() if self._records[name].hopeless(use, kind, requests)]
        for name in gone:
            self._records[name].ended(request.used.pop(name), kind)
            self._leave_out(request, name, requests, "given_up")
        return tuple(gone)

    def end(self, request: LiveRequest) -> None:
        """Learn from a request that has ended."""
        for name, use in request.used.items():
            self._records[name].ended(use, _kind(request))
        request.used.clear()

    def _count(self, name: str, reason: str) -> None:
        reasons = self._choices.setdefault(name, {})
        reasons[reason] = reasons.get(reason, 0) + 1

    def _leave_out(self, request: LiveRequest, name: str, requests: int, reason: str) -> None:
        self._count(name, reason)
        request.sources = tuple(each for each in request.sources if each != name)
        request.note_switch(f"without {name}: {self._records[name].why(_kind(request), requests)}")


def costly(plan: Plan) -> tuple[str, ...]:
    """The plan's costly sources. The user chooses those that read an index, unless the strategy is ``auto``."""
    return tuple(
        name
        for name in (plan.sources if plan.speculates else ())
        if (spec := SOURCES.get(name)) is not None
        and (spec.kind == "model" or (plan.strategy == AUTO and (spec.retrieval or spec.layers)))
    )


def reach(tree: TokenTree, tokens: Sequence[int], without: str) -> int:
    """How many of ``tokens`` lie on a path from the root without nodes of one source."""
    below, node = children(tree), ROOT
    for count, token in enumerate(tokens):
        named = (child for child in below.get(node, ()) if tree.tokens[child] == token and tree.sources[child] != without)
        found = next(named, None)
        if found is None:
            return count
        node = found
    return len(tokens)
