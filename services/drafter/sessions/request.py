"""One request at the drafter: its sources' sessions, the prefix that is drafted for, and the drafts still expected."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.drafter.sessions.known_states import KnownStates
from services.drafter.sessions.model_group import ModelGroup
from services.drafter.sessions.text_group import TextSession
from services.drafter.sources.interfaces import Ahead
from speculation.messages import Draft
from speculation.records import maker
from speculation.types import TokenTree

_make_draft = maker(Draft)


@dataclass(kw_only=True, slots=True, eq=False)
class DraftedPrefix:
    """The prefix that drafts for a request continue; drafting began at ``start`` (seconds, ``perf_counter``).

    ``max_nodes`` and ``min_probability`` as in ``StepReport``; with no nodes, no draft is wanted.

    ``expected`` are the models' drafts that have not been sent, each with its group and prefix. Some are for earlier
    prefixes, which models were working on when this one came: part of a long draft may still be useful.

    ``assumed`` are the outcomes of its step that drafts were sent for, by group, the likeliest first.
    """

    length: int
    hash: int
    max_nodes: int
    min_probability: float
    start: float
    expected: dict[asyncio.Future[TokenTree | None], tuple[str, DraftedPrefix]]
    assumed: dict[str, list[tuple[int, ...]]]


_make_prefix = maker(DraftedPrefix)


def drafted_prefix(*, length: int, hash: int, max_nodes: int, start: float, min_probability: float = 0.0) -> DraftedPrefix:
    """A prefix for which nothing is expected or assumed yet."""
    return _make_prefix(
        length=length,
        hash=hash,
        max_nodes=max_nodes,
        min_probability=min_probability,
        start=start,
        expected={},
        assumed={},
    )


@dataclass(kw_only=True, slots=True, eq=False)
class DraftedRequest:
    """A session.

    Attributes:
        text: None if the plan names no text source, or all have failed.
        text_s: seconds that the text sources took for the last step that they were told of alone, or too slowly;
            infinite before the first one. ``prefix`` and ``answer`` are behind while it has entered ``SessionsTogether``.
        counted: whether the text sources have read all of the prompt.
        answer: the answer so far, where it will be shared; None: it will not.
        generation: of its tenant's shared answers when it was opened; None: not known.
    """

    id: str
    tenant: str | None
    traceparent: str
    models: Sequence[ModelGroup]
    reads_states: bool
    prefix: DraftedPrefix
    text: TextSession | None = None
    text_s: float = math.inf
    counted: bool = False
    answer: list[int] | None = None
    generation: int | None = None
    states: KnownStates = field(default_factory=KnownStates)

    def drafts_within(self, most_s: float) -> bool:
        """Whether text sources alone draft for it, have read all of the prompt, and take at most so many seconds."""
        return self.text_s <= most_s and self.counted and not self.models

    def begin(self, prefix: DraftedPrefix) -> None:
        """Draft for another prefix from now on; ask all models for drafts of it.

        If no draft is asked for, a model that has not begun an earlier one makes it for this prefix instead: it will have
        been told of the prefix by then.
        """
        before, self.prefix = self.prefix, prefix
        if not self.models:
            return
        for group in self.models:
            asked = (prefix.max_nodes, prefix.min_probability) if prefix.max_nodes else group.waiting_for(self.id)
            if asked is not None:
                prefix.max_nodes, prefix.min_probability = asked
                prefix.expected[group.draft(self.id, *asked, self.states)] = (group.name, prefix)
        prefix.expected |= before.expected

    def draft(
        self,
        prefix: DraftedPrefix,
        group: str,
        tree: TokenTree,
        *,
        assumed: tuple[int, ...] = (),
        more: bool = False,
        unready: bool = False,
    ) -> Draft:
        """The message that carries a group's tree for a prefix."""
        return _make_draft(
            session_id=self.id,
            base_length=prefix.length,
            base_hash=prefix.hash,
            assumed=assumed,
            tree=tree,
            group=group,
            more=more,
            unready=unready,
            drafting_s=0.0 if assumed else time.perf_counter() - prefix.start,
        )

    def ahead(self, prefix: DraftedPrefix, group: str, made: Ahead) -> Draft:
        """The message that carries a group's tree for an outcome of a prefix's step."""
        prefix.assumed.setdefault(group, []).append(made.assumed)
        return self.draft(prefix, group, made.tree, assumed=made.assumed)
