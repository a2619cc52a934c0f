"""Reports the decoding loop to the metrics port. The loop's counts are read on demand; steps are observed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from services.metrics.registry import Metrics, Values
from services.verifier.engine.admission import Admission
from services.verifier.engine.passes import Part, PassWork
from services.verifier.engine.singles import Singles
from services.verifier.engine.stats import LoopStats


class LoopMetrics:
    """The metrics of one loop."""

    def __init__(self, metrics: Metrics, stats: LoopStats, requests: Admission) -> None:
        self._stats = stats
        self._waited_s = 0.0
        # Seconds by strategy and load.
        self._saved_s: dict[tuple[str, ...], float] = {}
        self._seconds = metrics.histogram("step_seconds")
        self._rows = metrics.histogram("step_rows")
        self._tokens = metrics.histogram("iteration_tokens")
        self._nodes = metrics.histogram("budget_nodes")
        self._wait = metrics.histogram("draft_wait_seconds")
        metrics.follow("num_requests_running", lambda: {(): len(requests.running)})
        metrics.follow("num_requests_waiting", lambda: {(): len(requests.waiting)})
        for name, attribute in (
            ("prefix_cache_queries_total", "prompt_tokens"),
            ("prefix_cache_hits_total", "prompt_tokens_cached"),
            ("preemptions_total", "preemptions"),
            ("draft_deadline_misses_total", "deadline_misses"),
            ("drafts_missed_total", "drafts_missed"),
            ("drafts_late_total", "drafts_late"),
            ("drafts_malformed_total", "drafts_malformed"),
        ):
            metrics.follow(name, partial(self._total, attribute))
        for name, attribute in (
            ("spec_decode_num_passes_total", "passes"),
            ("spec_decode_num_emitted_tokens_total", "tokens"),
            ("spec_decode_num_drafts_total", "drafts"),
            ("spec_decode_num_draft_tokens_total", "drafted"),
            ("spec_decode_num_accepted_tokens_total", "accepted"),
        ):
            metrics.follow(name, partial(self._by_strategy, attribute))
        metrics.follow("spec_decode_num_accepted_tokens_per_pos_total", self._by_position)
        metrics.follow("spec_decode_seconds_saved", self._saved_s.copy)
        metrics.follow("auto_choices_total", lambda: _by_reason(stats.source_choices))
        self._grammars = metrics.histogram("grammar_mask_seconds")
        metrics.follow("drafted_by_source_total", lambda: _labelled(stats.nodes_by_source))
        metrics.follow("accepted_by_source_total", lambda: _labelled(stats.accepted_by_source))

    def step(self, work: PassWork, seconds: float) -> None:
        """Count a pass whose results are here.

        Args:
            seconds: that it took.
        """
        parts, singles = work.parts, work.singles
        nodes = sum([len(part.tree.tokens) for part in parts])
        prompts = [part.chain for part in parts if part.chain > 1]
        prompt, decoding = sum(prompts), len(work) - len(prompts)
        committed = len(singles) + sum([len(part.verdict.committed) for part in parts if part.verdict is not None])
        if held := [part.request.grammar for part in parts if part.request.grammar is not None]:
            self._grammars.observe(sum(grammar.take_seconds() for grammar in held))
        self._seconds.observe(seconds, ("mixed" if decoding else "prompt") if prompt else "decode")
        self._rows.observe(prompt + decoding + nodes)
        self._tokens.observe(prompt + committed)
        self._nodes.observe(nodes)
        waited = self._stats.times.seconds.get("draft_wait", 0.0)
        self._wait.observe(waited - self._waited_s)
        self._waited_s = waited
        if singles.saved_s or any(part.saved_s for part in parts):
            self._count_saved(singles, [part for part in parts if part.verdict is not None])

    def _count_saved(self, singles: Singles, parts: Sequence[Part]) -> None:
        """Count what a step saved the requests that got tokens."""
        saved = [(part.request.strategy, part.saved_s) for part in parts if part.saved_s]
        if singles.saved_s:
            saved += [(strategy, count * singles.saved_s) for strategy, count in singles.by_strategy().items()]
        band = _band(len(singles) + len(parts))
        for strategy, saved_s in saved:
            self._saved_s[strategy, band] = self._saved_s.get((strategy, band), 0.0) + saved_s

    def _total(self, attribute: str) -> Values:
        return {(): getattr(self._stats, attribute)}

    def _by_strategy(self, attribute: str) -> Values:
        # A copy: the loop may meet a new strategy while another thread reads. Plain decoding has no drafts to tell of.
        strategies = self._stats.by_strategy.copy().items()
        return {(name,): value for name, counts in strategies if (value := getattr(counts, attribute)) or counts.drafts}

    def _by_position(self) -> Values:
        return {
            (name, str(position)): count
            for name, counts in self._stats.by_strategy.copy().items()
            if counts.drafts
            for position, count in enumerate(counts.accepted_at.copy())
        }


def _band(requests: int) -> str:
    """Loads that are counted together: 1, 2-3, 4-7, 8-15, ..."""
    least = 1 << (requests.bit_length() - 1)
    return "1" if least == 1 else f"{least}-{2 * least - 1}"


def _by_reason(choices: dict[str, dict[str, int]]) -> Values:
    return {(name, reason): count for name, reasons in choices.copy().items() for reason, count in reasons.copy().items()}


def _labelled(counts: dict[str, int]) -> Values:
    return {(name,): count for name, count in counts.copy().items()}
