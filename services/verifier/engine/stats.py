"""What the decoding loop counts: where its time goes, and what becomes of the drafts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from speculation.messages import Draft
from speculation.types import TokenTree


@dataclass(slots=True)
class StepTimes:
    """Seconds spent per part of a step, summed over steps."""

    steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time that the block takes to ``part``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def move(self, seconds: float, part: str, other: str) -> None:
        """Count time that was measured as ``part``'s as ``other``'s."""
        self.seconds[part] -= seconds
        self.seconds[other] = self.seconds.get(other, 0.0) + seconds


@dataclass(slots=True)
class LoopStats:
    """Counts since start.

    Attributes:
        drafts_ahead: drafts used that had been made before the step that they follow was decided.
        drafts_late: drafts that came when the pass that they were for had begun. What is left of them may still be used.
        drafting_s: what the drafts used took to make, waited for or not.
        preemptions: how often a request had to step back for want of memory.
        prompt_tokens: tokens of admitted requests, what was committed before a step back included;
            ``prompt_tokens_cached``: those of them that were in the cache already.
        nodes_by_source: tree nodes that were verified; ``accepted_by_source``: those of them that were accepted;
            ``probes_by_source``: nodes that were only computed.
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
    nodes_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    probes_by_source: dict[str, int] = field(default_factory=dict)

    def count_draft(self, draft: Draft | None) -> None:
        """Count what a speculating request has for the coming step."""
        if draft is None:
            self.drafts_missed += 1
            return
        self.drafts_used += 1
        self.drafts_ahead += bool(draft.assumed)
        self.drafting_s += draft.drafting_s

    def count_tree(self, tree: TokenTree, accepted_path: Sequence[int]) -> None:
        """Count the nodes of a verified tree."""
        probes = set(tree.probes)
        _count(self.nodes_by_source, [name for node, name in enumerate(tree.sources) if node not in probes])
        _count(self.probes_by_source, [tree.sources[node] for node in tree.probes])
        _count(self.accepted_by_source, [tree.sources[node] for node in accepted_path])


def _count(counts: dict[str, int], names: Sequence[str]) -> None:
    for name in names:
        counts[name] = counts.get(name, 0) + 1
