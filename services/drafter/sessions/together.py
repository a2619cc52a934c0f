"""The drafts of a step for all sessions that compiled code drafts for, in one go.

Such a session takes its steps without Python: it has entered. Whoever asks anything else of it lets it leave first, which
brings Python's part of it up to date.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from itertools import compress

from services.drafter.native.blend import KNOWN, CompiledBlendSession
from services.drafter.native.steps import NO_MEMORY, NOT_DONE, ready_for, take_steps
from services.drafter.sessions.request import DraftedRequest, drafted_prefix
from speculation.columns import DraftColumns, ReportColumns
from speculation.sources import TEXT


class SessionsTogether:
    """Drafts for sessions together. A session must leave before anything else is asked of it."""

    def __init__(self) -> None:
        # Of those that have entered: the address by which compiled code knows each.
        self._addresses: dict[str, int] = {}

    def drafted(
        self, sessions: OrderedDict[str, DraftedRequest], reports: ReportColumns, most_s: float, start: float
    ) -> DraftColumns | None:
        """Tell sessions of their steps, and draft for them. None: no session can be drafted for here, and nothing was done.

        Args:
            sessions: by their names; those that are drafted for become the last ones.
            most_s: longest time of a draft; who takes longer drafts alone next. Below 0: nobody drafts here.
            start: when drafting began, in seconds of ``perf_counter``.
        """
        known = self._addresses
        if most_s < 0:
            # Others draft meanwhile, and sessions learn from each other: in what order counts.
            for name in [*known]:
                self.leave(sessions[name])
            return None
        names = reports.session_ids
        addresses = array("Q", [known.get(name, 0) for name in names])
        for at in _zeros(ready_for(addresses, reports)):
            session = sessions.get(names[at])
            addresses[at] = 0 if session is None else self._enter(session, most_s)
        if not any(addresses):
            return None
        taken = take_steps(addresses, reports)
        done = [count != NOT_DONE for count in taken.counts]
        took_s = (time.perf_counter() - start) / max(1, sum(done))
        counts = [*compress(taken.counts, done)]
        ids = [*compress(names, done)]
        if NO_MEMORY in counts:
            for name in compress(ids, [count == NO_MEMORY for count in counts]):
                self.leave(sessions[name], counted=False)
            counts = [max(0, count) for count in counts]
        for name in ids:
            sessions.move_to_end(name)
            if took_s > most_s:
                # Its next ones are drafted for alone, and tell how long they take.
                sessions[name].text_s = took_s
                self.leave(sessions[name])
        return DraftColumns(
            left=[at for at, each in enumerate(done) if not each] if len(ids) < len(names) else (),
            session_ids=ids,
            base_lengths=[*compress(reports.lengths, done)],
            base_hashes=[*compress(reports.prefix_hashes, done)],
            node_counts=counts,
            tokens=taken.tokens,
            parents=taken.parents,
            sources=taken.sources,
            source_names=KNOWN,
            scores=taken.scores,
            drafting_s=took_s,
            group=TEXT,
        )

    def _enter(self, session: DraftedRequest, most_s: float) -> int:
        """The address of a session that may take a step here; 0: it may not."""
        self.leave(session)
        joined = None if session.text is None else session.text.joined
        if not isinstance(joined, CompiledBlendSession) or not session.drafts_within(most_s):
            return 0
        address = joined.enter(session.prefix.length, session.prefix.hash)
        if address:
            self._addresses[session.id] = address
        return address

    def leave(self, session: DraftedRequest, *, counted: bool = True) -> None:
        """Bring a session up to date with the steps that it has taken here, if it has entered.

        Args:
            counted: as of ``CompiledBlendSession.settle``.
        """
        if self._addresses.pop(session.id, None) is None:
            return
        assert session.text is not None and isinstance(session.text.joined, CompiledBlendSession)
        taken, before = session.text.joined.settle(counted=counted), session.prefix
        if taken is None:
            return
        if session.answer is not None:
            session.answer += taken.tokens
        session.begin(drafted_prefix(length=taken.length, hash=taken.hash, max_nodes=before.max_nodes, start=before.start))


def _zeros(ready: bytes) -> list[int]:
    return [at for at, each in enumerate(ready) if not each] if 0 in ready else []
