"""What the text sources draft for a session, with what an index finds, alone and together with a model."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from services.drafter.sessions.request import DraftedRequest
from services.drafter.sessions.text_group import TextSession
from services.drafter.sessions.text_work import if_still, prepared
from services.drafter.sessions.thread import DraftingThread
from speculation.errors import OutriderError
from speculation.messages import Continuation, Draft, RetrievalQuery
from speculation.ports import Retriever
from speculation.sources import TEXT
from speculation.types import TokenTree

log = logging.getLogger(__name__)


class TextDrafts:
    """Lets the text sources draft in their thread.

    Args:
        retriever: access to the retrieval index, if there is one.
        deadline_s: how long its answer is waited for.

    Attributes:
        retrievals_missed: look-ups that failed or came too late.
    """

    def __init__(self, thread: DraftingThread, retriever: Retriever | None, deadline_s: float) -> None:
        self._thread, self._retriever, self._deadline_s = thread, retriever, deadline_s
        self.retrievals_missed = 0

    async def draft(self, session: DraftedRequest, prepare: Callable[[], TextSession]) -> Draft | None:
        """The text sources' draft, after ``prepare`` has opened them or told them of a step.

        If they fail in a session that has models too, the models go on alone.
        """
        try:
            tree = await self._tree(session, prepare)
        except Exception:
            if not session.models:
                raise
            log.exception("text sources draft nothing more for session %s", session.id)
            session.text = None
            return None
        return session.draft(session.prefix, TEXT, tree, more=bool(session.models and session.prefix.max_nodes))

    async def _tree(self, session: DraftedRequest, prepare: Callable[[], TextSession]) -> TokenTree:
        nodes = session.prefix.max_nodes
        looks_up = self._retriever is not None
        preparing = self._thread.run(prepared, prepare, nodes, looks_up, expected_s=session.text_s)
        text, queries, tree, took_s = await preparing
        # The time to open a session says nothing about the time of a step.
        session.text_s = math.inf if session.text is None else took_s
        session.text = text
        if tree is None:
            # All at once, so that the queries share a message.
            found = await asyncio.gather(*(self._look_up(session, query) for query in queries))
            tree = await self._thread.run(text.draft, nodes, found)
        return tree

    async def _look_up(self, session: DraftedRequest, query: RetrievalQuery | None) -> Sequence[Continuation] | None:
        """What the index finds; empty after the deadline or an error, since no hits are better than a late draft.

        None if there was no query.
        """
        if self._retriever is None or query is None:
            return None
        query = replace(query, session_id=session.id, traceparent=session.traceparent)
        try:
            async with asyncio.timeout(self._deadline_s):
                return (await self._retriever.retrieve(query)).continuations
        except (TimeoutError, OutriderError) as error:
            log.debug("no retrieval: %s", error)
        except Exception:
            log.exception("retrieval failed")
        self.retrievals_missed += 1
        return ()

    async def join(self, session: DraftedRequest, text: TextSession, group: str, tree: TokenTree) -> TokenTree:
        """The draft of a model and the text sources together; the model's alone if the request has moved on meanwhile."""
        prefix = session.prefix
        join = partial(text.join, group, tree, prefix.max_nodes)
        try:
            joined = await self._thread.run(if_still, session, prefix, join, expected_s=session.text_s)
        except Exception:
            log.exception("%s and the text sources cannot draft together for session %s", group, session.id)
            return tree
        return tree if joined is None else joined
