"""Statistics of the decoding loop: time per part of a step, and counts of drafts, nodes and tokens."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain

from services.verifier.engine.switches import Why
from speculation.messages import Draft
from speculation.types import TokenTree, Verdict


class _Measured:
    """Adds a block's running time to a part. No generator: it is entered for every part of every step."""

    __slots__ = ("_part", "_start", "_times")

    def __init__(self, times: StepTimes, part: str) -> None:
        self._times, self._part = times, part

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._times.add(self._part, time.perf_counter() - self._start)


@dataclass(slots=True)
class StepTimes:
    """Seconds spent per part of a step, summed over steps."""

    steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def measure(self, part: str) -> AbstractContextManager[None]:
        """Add the block's running time to ``part``."""
        return _Measured(self, part)

    def add(self, part: str, seconds: float) -> None:
        """Add measured time to ``part``."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def move(self, seconds: float, part: str, other: str) -> None:
        """Move measured time from ``part`` to ``other``."""
        self.seconds[part] -= seconds
        self.seconds[other] = self.seconds.get(other, 0.0) + seconds


# Positions in a draft that are counted one by one.
_POSITIONS = 32


@dataclass(slots=True)
class StrategyCounts:
    """What passes brought one strategy's requests, and what became of their drafts, without probes.

    Attributes:
        passes: passes of a request that brought tokens, with drafts or without; ``tokens``: what they brought.
        drafts: passes of a request with drafted tokens.
        accepted_at: those of them that accepted a token at depth 0, 1, ...
    """

    passes: int = 0
    tokens: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=lambda: [0] * _POSITIONS)

    def count_drafted(self, drafted: int, accepted: int) -> None:
        """Count the drafts of a request's pass."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        counts = self.accepted_at
        for depth in range(accepted if accepted < _POSITIONS else _POSITIONS):
            counts[depth] += 1


@dataclass(slots=True)
class LoopStats:
    """Counts since start.

    Attributes:
        drafts_used: steps of a request with a draft at hand; ``drafts_missed``: steps without one where drafting pays.
        drafts_ahead: drafts used that were made before the preceding step was decided.
        drafts_late: drafts that came after their pass had begun. Their remainder may still be used.
        drafts_malformed: drafts dropped because their tree was invalid.
        drafting_s: seconds spent on making the drafts used, whether or not a step waited for them.
        preemptions: how often a request was preempted because the cache was full.
        prompt_tokens: tokens of admitted requests; after a preemption its committed tokens count again.
        prompt_tokens_cached: those of them that were in the cache already.
        deadline_misses: waits for drafts that ended at their deadline, with one still missing.
        by_strategy: what passes brought, and what became of drafts, by the strategy of their request.
        nodes_by_source: tree nodes verified, without probes; ``accepted_by_source``: those of them that were accepted;
            ``probes_by_source``: nodes that were computed but not candidates for acceptance.
        source_choices: decisions whether a costly source drafts for a request, by source and reason.
        weighed: sums over the "times" that a costly source was left out: what it "brings", in extra tokens for each other
            one, and what it "costs", as a share of a step.
        named: of requests by their paper's rule, for each source: "answers" and "steps" for which it was to draft, "answers
            without", in which it did not always, and the steps in which it did not, by reason.
        saved_s: seconds by which tokens came sooner than by plain decoding, less those by which they came later.
        rows: rows of all passes, without stream rows.
        stream_rows: stream rows, each counted as the share of the layers that it goes through.
        rows_observed: rows whose hidden states were kept.
    """

    times: StepTimes = field(default_factory=StepTimes)
    drafts_used: int = 0
    drafts_ahead: int = 0
    drafts_missed: int = 0
    drafts_late: int = 0
    drafts_malformed: int = 0
    drafting_s: float = 0.0
    preemptions: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    deadline_misses: int = 0
    by_strategy: dict[str, StrategyCounts] = field(default_factory=dict)
    nodes_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    probes_by_source: dict[str, int] = field(default_factory=dict)
    source_choices: dict[str, dict[str, int]] = field(default_factory=dict)
    weighed: dict[str, dict[str, float]] = field(default_factory=dict)
    named: dict[str, dict[str, int]] = field(default_factory=dict)
    saved_s: float = 0.0
    rows: int = 0
    stream_rows: float = 0.0
    rows_observed: int = 0

    def count_drafts(self, drafts: Sequence[Draft | None]) -> None:
        """Count requests' drafts for the coming step, or their absence."""
        used = [draft for draft in drafts if draft is not None]
        self.drafts_missed += len(drafts) - len(used)
        self.drafts_used += len(used)
        for draft in used:
            self.drafts_ahead += bool(draft.assumed)
            self.drafting_s += draft.drafting_s

    def count_named(self, sources: Sequence[str], steps: int, undrafted: Mapping[tuple[str, Why], int]) -> None:
        """Count the steps of an answer by its paper's rule.

        Args:
            sources: that were to draft for it.
            steps: that were to have a draft of each.
            undrafted: those that went without, by source and reason.
        """
        for source in sources if steps else ():
            reasons = self.named.setdefault(source, {"answers": 0, "steps": 0, "answers without": 0})
            found = {why: count for (name, why), count in undrafted.items() if name == source}
            counted: dict[str, int] = {"answers": 1, "steps": steps, "answers without": int(bool(found))}
            for name, count in (*counted.items(), *found.items()):
                reasons[name] = reasons.get(name, 0) + count

    def count_rows(self, rows: int, stream_rows: float, observed: int) -> None:
        """Count the rows of one pass; all as in the attributes."""
        self.rows += rows
        self.stream_rows += stream_rows
        self.rows_observed += observed

    def count_singles(self, by_strategy: Mapping[str, int]) -> None:
        """Count what a pass brought so many requests of each strategy: one token each."""
        for strategy, count in by_strategy.items():
            counts = self._counts_of(strategy)
            counts.passes += count
            counts.tokens += count

    def _counts_of(self, strategy: str) -> StrategyCounts:
        counts = self.by_strategy.get(strategy)
        if counts is None:
            counts = self.by_strategy[strategy] = StrategyCounts()
        return counts

    def count_pass(self, tree: TokenTree, verdict: Verdict, strategy: str) -> None:
        """Count what a pass brought one request, and the nodes of its tree; ``strategy`` is the request's."""
        counts = self._counts_of(strategy)
        counts.passes += 1
        counts.tokens += len(verdict.committed)
        if not tree.tokens:
            return
        accepted_path = verdict.accepted_path
        if drafted := len(tree.tokens) - len(tree.probes):
            counts.count_drafted(drafted, len(accepted_path))
        if not tree.probes:
            _count(self.nodes_by_source, tree.sources)
        else:
            probes = set(tree.probes)
            _count(self.nodes_by_source, [name for node, name in enumerate(tree.sources) if node not in probes])
            _count(self.probes_by_source, [tree.sources[node] for node in tree.probes])
        accepted = self.accepted_by_source
        for node in accepted_path:
            name = tree.sources[node]
            accepted[name] = accepted.get(name, 0) + 1

    def count_together(self, trees: Sequence[TokenTree], verdicts: Sequence[Verdict], strategies: Sequence[str]) -> None:
        """As ``count_pass`` of each request; their trees have no probes."""
        if len({*strategies}) > 1:
            for each in zip(trees, verdicts, strategies, strict=True):
                self.count_pass(*each)
            return
        counts, sizes = self._counts_of(strategies[0]), [len(tree.tokens) for tree in trees]
        counts.passes += len(trees)
        counts.tokens += sum([len(verdict.committed) for verdict in verdicts])
        counts.drafts += len(sizes) - sizes.count(0)
        counts.drafted += sum(sizes)
        for accepted, count in Counter([len(verdict.accepted_path) for verdict in verdicts]).items():
            counts.accepted += accepted * count
            for depth in range(min(accepted, _POSITIONS)):
                counts.accepted_at[depth] += count
        for name, count in Counter(chain.from_iterable([tree.sources for tree in trees])).items():
            self.nodes_by_source[name] = self.nodes_by_source.get(name, 0) + count
        paths = zip(trees, verdicts, strict=True)
        for name, count in Counter([tree.sources[node] for tree, each in paths for node in each.accepted_path]).items():
            self.accepted_by_source[name] = self.accepted_by_source.get(name, 0) + count


def _count(counts: dict[str, int], names: Sequence[str]) -> None:
    for name in dict.fromkeys(names):
        counts[name] = counts.get(name, 0) + names.count(name)
