"""The drafts of a step for all sessions that compiled code drafts for, in one go."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import compress

from services.drafter.native.blend import KNOWN, CompiledBlendSession
from services.drafter.native.steps import NOT_DONE, take_steps
from services.drafter.sessions.request import DraftedRequest, drafted_prefix
from speculation.columns import DraftColumns, ReportColumns
from speculation.sources import TEXT


def drafted_together(sessions: Sequence[DraftedRequest | None], reports: ReportColumns, start: float) -> DraftColumns | None:
    """Tell sessions of their steps, and draft for them. None: no session can be drafted for here, and nothing was done.

    Args:
        sessions: the session of each report; None: its report is to be left.
        start: when drafting began, in seconds of ``perf_counter``.
    """
    blends = [None if session is None else _compiled(session) for session in sessions]
    if not any(blends):
        return None
    prefixes = [(0, 0) if session is None else (session.prefix.length, session.prefix.hash) for session in sessions]
    taken = take_steps(blends, prefixes, reports)
    done = [count != NOT_DONE for count in taken.counts]
    took_s = (time.perf_counter() - start) / max(1, sum(done))
    first = 0
    columns = zip(
        sessions,
        done,
        reports.committed_counts,
        reports.lengths,
        reports.prefix_hashes,
        reports.max_nodes,
        reports.min_probabilities,
        strict=True,
    )
    for session, drafted, many, length, prefix_hash, nodes, least in columns:
        if session is not None and drafted:
            session.text_s = took_s
            if session.answer is not None:
                session.answer += reports.committed[first : first + many]
            session.begin(
                drafted_prefix(length=length, hash=prefix_hash, max_nodes=nodes, min_probability=least, start=start)
            )
        first += many
    return DraftColumns(
        left=[at for at, each in enumerate(done) if not each],
        session_ids=list(compress(reports.session_ids, done)),
        base_lengths=list(compress(reports.lengths, done)),
        base_hashes=list(compress(reports.prefix_hashes, done)),
        node_counts=list(compress(taken.counts, done)),
        tokens=taken.tokens,
        parents=taken.parents,
        sources=taken.sources,
        source_names=KNOWN,
        scores=taken.scores,
        drafting_s=took_s,
        group=TEXT,
    )


def _compiled(session: DraftedRequest) -> CompiledBlendSession | None:
    joined = None if session.text is None else session.text.joined
    return joined if isinstance(joined, CompiledBlendSession) else None
