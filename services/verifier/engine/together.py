"""Gives ordinary requests that are drafted for what a pass brought them, all of them at once.

``Delivery`` and ``Drafting.report`` do it for each alone, and are the references: requests get, learn and tell the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from services.verifier.engine.deciding.asking import Prices
from services.verifier.engine.deciding.draft_wait import DraftWait
from services.verifier.engine.drafting import Drafting
from services.verifier.engine.events import Events
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.native.commits import CompiledRepetition, commit_together
from services.verifier.engine.passes import Part
from services.verifier.engine.stats import LoopStats
from speculation.budget import Wanted
from speculation.messages import Progress
from speculation.records import maker
from speculation.types import EMPTY_TREE, Verdict

_make_progress = maker(Progress)
# As few take no longer one by one.
_FEWEST = 2


def in_turn(parts: Sequence[Part], *, quiet: bool) -> Iterator[tuple[bool, list[Part]]]:
    """The parts in their order, in runs of those that go together, and of those that go alone.

    Args:
        quiet: nobody is told anything.
    """
    for together, run in groupby(parts, _goes_together):
        found = [*run]
        yield together and not quiet and len(found) >= _FEWEST, found


def _goes_together(part: Part) -> bool:
    request, verdict = part.request, part.verdict
    if not (request.ordinary and request.told) or part.error is not None or part.chain != 1:
        return False
    if verdict is None or verdict.finish_reason is not None or request.used or part.tree.probes:
        return False
    boxes = [*request.mailboxes.values()]
    return len(boxes) == 1 and boxes[0].rated


class Together:
    """Delivers to those that go together.

    Args:
        told: gets what consumers are to be woken for.
    """

    def __init__(self, stats: LoopStats, drafting: Drafting, draft_wait: DraftWait, told: list[Events]) -> None:
        self._stats = stats
        self._drafting = drafting
        self._draft_wait = draft_wait
        self._told = told

    def deliver(self, parts: Sequence[Part], wanted: Wanted, prices: Prices | None) -> None:
        """Give requests the results of their parts, and report these to their origins."""
        requests, trees = [part.request for part in parts], [part.tree for part in parts]
        verdicts = [part.verdict for part in parts if part.verdict is not None]
        self._stats.count_together(trees, verdicts, [request.strategy for request in requests])
        for part, verdict in zip(parts, verdicts, strict=True):
            self._stats.saved_s += part.saved_s
            if part.request.waited_since is not None:
                self._draft_wait.learn(part.request, verdict)
        _commit(requests, verdicts)
        self._tell(parts, verdicts)
        self._drafting.report_together(requests, verdicts, wanted, prices)

    def _tell(self, parts: Sequence[Part], verdicts: Sequence[Verdict]) -> None:
        """As ``progress_of`` of each, of what such a request is told."""
        told = self._told
        for part, verdict in zip(parts, verdicts, strict=True):
            request, sources, path = part.request, part.tree.sources, verdict.accepted_path
            events = request.events
            events.add(
                _make_progress(
                    token_ids=verdict.committed,
                    queue_s=request.queue_s,
                    cached_tokens=request.cached,
                    num_drafted=len(sources),
                    accepted_sources=tuple([sources[node] for node in path]) if path else (),
                    switches=request.switches.take(),
                    saved_s=part.saved_s,
                )
            )
            told.append(events)


def _commit(requests: Sequence[LiveRequest], verdicts: Sequence[Verdict]) -> None:
    """As ``LiveRequest.commit`` of each, and their rows."""
    boxes = [box for request in requests for box in request.mailboxes.values()]
    ready = [box.only(request.tokens) for request, box in zip(requests, boxes, strict=True)]
    committed = [verdict.committed for verdict in verdicts]
    texts = [request.repetition for request in requests if isinstance(request.repetition, CompiledRepetition)]
    trees = [EMPTY_TREE if found is None else found.tree for found in ready]
    done = commit_together(committed, trees, texts, [request.prefixes.hash for request in requests])
    columns = zip(requests, boxes, verdicts, ready, *done, strict=True)
    for request, box, verdict, found, prefix_hash, right, remains, begins in columns:
        held, tokens = request.tokens, verdict.committed
        if found is None:
            box.learn(held, tokens, request.most_credited)
        else:
            box.learn_of(found, len(held) + len(tokens), right, request.most_credited, remains=remains)
        held.extend(tokens)
        request.computed += 1 + len(verdict.accepted_path)
        request.repetition.begins = begins
        request.prefixes.note(len(held), prefix_hash)
        box.drop_old()
