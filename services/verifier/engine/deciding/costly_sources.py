"""Decides which of its plan's costly sources draft for a request (docs/decisions.md). Uses no clock.

A source is costly if a model runs for it, perhaps on the target's own cores, or if it reads hidden states or an index. It
slows steps down, whether or not its drafts are accepted. Its gain is known exactly, since drafts change no text: the tokens
accepted beyond those of the other drafts at hand. Its cost is measured: how much longer a step takes while requests use it,
from the end of one pass to the end of the next. A source that costs more than it gains is left out. It is told nothing, and
the passes compute nothing for it.

A source is tried in the first request, and given up there as soon as it proves too costly. It is tried again in one request
of 16, of 32 and so on, after an hour, or at a new load. If it pays, one request of 32 goes without it, so its cost stays
known.

Several may draft for one request, if each pays for what it adds to all the others. They are taken in by price, the cheapest
first. Then each is looked at again: one that a dearer one has made needless is left out. Of two that bring the same, the
cheaper one stays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from services.verifier.engine.deciding.cost_slope import CostSlope
from services.verifier.engine.deciding.source_use import Brought, Use
from services.verifier.engine.live_request import LiveRequest
from speculation.sources import AUTO, runs_model, spec_of
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


# So many kinds of requests are remembered; those that were asked about longest ago go first.
_MOST_KINDS = 4096

# The gain of a source depends on whether the target samples, on the prompt's length (rounded to a power of two), on the
# other costly sources that draft as well, and on the target's adapter: it may say what no drafter was trained on.
_Kind = tuple[bool, int, frozenset[str], str]


def _kind(request: LiveRequest, name: str) -> _Kind:
    message, others = request.message, frozenset(request.used) - {name}
    return message.sampling.temperature > 0, len(message.prompt).bit_length(), others, message.adapter


class Record:
    """What one costly source gains and costs, over all requests."""

    def __init__(self) -> None:
        self.cost = CostSlope(_MOST_SLOWER, known=_KNOWN)
        self.trials = 0
        self._all = Brought()
        self._by_kind: OrderedDict[_Kind, Brought] = OrderedDict()
        self._every, self._since, self._tried_at = _TRY_EVERY, 0, 0.0
        self._loads: set[int] = set()
        self._alternate = False

    def brought(self, kind: _Kind) -> Brought:
        """The tokens that it brought to requests of a kind."""
        found = self._by_kind.setdefault(kind, Brought())
        self._by_kind.move_to_end(kind)
        if len(self._by_kind) > _MOST_KINDS:
            self._by_kind.popitem(last=False)
        return found

    @property
    def price(self) -> tuple[bool, float]:
        """Orders sources by their cost: those whose cost is unknown come last."""
        return not self.cost.known, self.cost.seconds

    def speed(self, share: float, requests: int, others_s: float = 0.0) -> float:
        """Tokens per second with the source in one of ``requests``, over those without it.

        Args:
            share: extra tokens that it brings, for each other one.
            others_s: how much longer a step takes for the other costly sources of that request.
        """
        return (1.0 + share / requests) / self._slower(requests, others_s)

    def _slower(self, requests: int, others_s: float) -> float:
        step_s = self.cost.without_s(requests)
        return 1.0 + self.cost.seconds / (step_s + others_s) if step_s else 1.0

    def pays(self, kind: _Kind, requests: int, others_s: float = 0.0) -> bool:
        """Whether a request is expected to be faster with the source, by more than the noise."""
        return self.speed(self.brought(kind).share(self._all), requests, others_s) > _LEAST_GAIN

    def decide(self, kind: _Kind, requests: int, now: float, *, may_try: bool, others_s: float = 0.0) -> Use | None:
        """Whether the next request uses the source.

        Args:
            requests: decoded at once, this one included.
            now: seconds.
            may_try: whether a trial is possible. Two in one request would say little about either.
            others_s: as in ``speed``.
        """
        self._since += 1
        pays = self.pays(kind, requests, others_s)
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

    def hopeless(self, use: Use, kind: _Kind, requests: int, others_s: float = 0.0) -> float | None:
        """The speed with the source over that without it, if a request should use it no longer; None: it should."""
        if use.steps % _JUDGE_EVERY or not use.steps or (use.drafts < _FEWEST_DRAFTS and use.steps < _MOST_SILENT):
            return None
        # A trial counts by itself: the gain may have changed.
        share = use.brought.share(None if use.trial else self.brought(kind))
        speed = self.speed(share, requests, others_s)
        if use.trial and not self.cost.known:
            gone = not use.brought.part or (use.steps >= _FIRST_TRIAL and use.brought.share() < 1.0)
        else:
            gone = speed < 1.0
        return speed if gone else None

    def learn(self, use: Use, kind: _Kind) -> None:
        """Learn from a use that has ended, or goes on beside other sources."""
        self.brought(kind).learn(use.brought.part, use.brought.whole)
        self._all.learn(use.brought.part, use.brought.whole)

    def ended(self, use: Use, kind: _Kind) -> None:
        """Learn from a use that has ended."""
        self.learn(use, kind)
        self.trials -= use.trial

    def weighed(self, kind: _Kind, requests: int, others_s: float = 0.0) -> tuple[float, float]:
        """Its gain and cost: extra tokens that it brings for each other one, and by which share it makes steps longer."""
        return self.brought(kind).share(self._all), self._slower(requests, others_s) - 1.0


class CostlySources:
    """Decides for all requests of one loop.

    Args:
        choices: counts its decisions, by source and reason.
        weighed: sums of what was expected of sources when they were left out, as in ``LoopStats``.
    """

    def __init__(self, choices: dict[str, dict[str, int]], weighed: dict[str, dict[str, float]]) -> None:
        self._choices = choices
        self._weighed = weighed
        self._records: dict[str, Record] = {}

    def begin(self, request: LiveRequest, requests: int, now: float) -> None:
        """Choose the sources of a request that begins.

        Args:
            requests: decoded at once, this one included.
            now: seconds.
        """
        wanted = {name: self._records.setdefault(name, Record()) for name in costly(request.message.plan)}
        for name, record in sorted(wanted.items(), key=lambda each: each[1].price):
            tried = any(use.trial for use in request.used.values())
            kind, others_s = _kind(request, name), self._cost_s(request.used)
            use = record.decide(kind, requests, now, may_try=not tried, others_s=others_s)
            if use is None:
                self._leave_out(request, name, requests, "too_costly")
            else:
                record.trials += use.trial
                request.used[name] = use
        self._leave_out_needless(request, requests)
        for name, use in request.used.items():
            self._count(name, "trial" if use.trial else "pays")
        # Asked in this order.
        models = [name for name in request.used if runs_model(name)]
        request.sources = (*(name for name in request.sources if name not in models), *models)

    def _leave_out_needless(self, request: LiveRequest, requests: int) -> None:
        """Leave out those that do not pay beside dearer ones, which were decided on later."""
        if len(request.used) < 2 or any(use.trial for use in request.used.values()):
            return
        for name in tuple(request.used):
            others_s = self._cost_s(request.used, without=name)
            if not self._records[name].pays(_kind(request, name), requests, others_s):
                del request.used[name]
                self._leave_out(request, name, requests, "too_costly")

    def _cost_s(self, names: Iterable[str], *, without: str = "") -> float:
        """How many seconds longer a step takes with these sources."""
        return sum(self._records[name].cost.seconds for name in names if name != without)

    def learn_pass(self, batch: Sequence[LiveRequest], seconds: float, *, idle: bool) -> None:
        """Learn the cost of sources from a pass without prompts.

        Args:
            seconds: from the end of the pass before to its end.
            idle: nobody drafted meanwhile.
        """
        units = {name: 0 if idle else sum(name in request.used for request in batch) for name in self._records}
        costs = {name: self._records[name].cost.seconds * count for name, count in units.items()}
        for name, record in self._records.items():
            # What the others are known to cost is none of its own.
            own_s = max(0.0, seconds - (sum(costs.values()) - costs[name]))
            mean_s = record.cost.without_s(len(batch)) or own_s
            record.cost.learn(requests=len(batch), units=units[name], seconds=own_s, pass_s=mean_s)

    def learn_step(self, request: LiveRequest, committed: Sequence[int], accepted: int) -> None:
        """Learn the gain of a request's sources from a step, before it is committed.

        Args:
            committed: the step's tokens; the first ``accepted`` of them had been drafted.
        """
        for name, use in request.used.items():
            reached = 0
            if accepted:
                others = [each.tree for each in request.drafts() if each.draft.group != name]
                reached = reach(others, committed[:accepted], name)
            use.steps += 1
            use.brought.learn(accepted - reached, len(committed) - (accepted - reached))
            model = runs_model(name)
            use.drafts = sum(box.received[name] if model else box.received.total() for box in request.mailboxes.values())

    def given_up(self, request: LiveRequest, requests: int) -> tuple[str, ...]:
        """Give up the request's least useful source, if it is hopeless. Returns its name.

        One at a time: what the others add without it is not known yet.
        """
        speeds: dict[str, float] = {}
        for name, use in request.used.items():
            others_s = self._cost_s(request.used, without=name)
            speed = self._records[name].hopeless(use, _kind(request, name), requests, others_s)
            if speed is not None:
                speeds[name] = speed
        if not speeds:
            return ()
        gone = min(speeds, key=lambda name: speeds[name])
        for name, use in request.used.items():
            self._records[name].learn(use, _kind(request, name))
        use = request.used.pop(gone)
        self._records[gone].trials -= use.trial
        self._leave_out(request, gone, requests, "given_up")
        for name, other in request.used.items():
            request.used[name] = Use(trial=other.trial)
        return (gone,)

    def end(self, request: LiveRequest) -> None:
        """Learn from a request that has ended."""
        for name, use in request.used.items():
            self._records[name].ended(use, _kind(request, name))
        request.used.clear()

    def _count(self, name: str, reason: str) -> None:
        reasons = self._choices.setdefault(name, {})
        reasons[reason] = reasons.get(reason, 0) + 1

    def _leave_out(self, request: LiveRequest, name: str, requests: int, reason: str) -> None:
        self._count(name, reason)
        request.sources = tuple(each for each in request.sources if each != name)
        others_s = self._cost_s(request.used, without=name)
        brings, costs = self._records[name].weighed(_kind(request, name), requests, others_s)
        sums = self._weighed.setdefault(name, {"times": 0, "brings": 0.0, "costs": 0.0})
        for what, share in (("times", 1), ("brings", brings), ("costs", costs)):
            sums[what] += share
        why = f"{100 * brings:.0f} % more tokens, steps {100 * costs:.0f} % longer"
        request.switches.note(request.generated, f"without {name}: {why}")


def costly(plan: Plan) -> tuple[str, ...]:
    """The plan's costly sources. The user chooses those that read an index, unless the strategy is ``auto``."""
    return tuple(
        name
        for name in (plan.sources if plan.speculates else ())
        if (spec := spec_of(name)) is not None
        and (spec.kind == "model" or (plan.strategy == AUTO and (spec.retrieval or spec.layers)))
    )


def reach(trees: Iterable[TokenTree], tokens: Sequence[int], without: str) -> int:
    """How many of ``tokens`` the trees hold together, if the nodes of one source are left out.

    A node that stands in another tree as another source's is that one's, too.
    """
    at = [(tree, children(tree), ROOT) for tree in trees]
    for count, token in enumerate(tokens):
        at = [
            (tree, below, child) for tree, below, node in at for child in below.get(node, ()) if tree.tokens[child] == token
        ]
        if all(tree.sources[node] == without for tree, _, node in at):
            return count
    return len(tokens)
