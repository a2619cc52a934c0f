"""What a drafter does for a session in its text sources' thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from services.drafter.sessions.request import DraftedPrefix, DraftedRequest
from services.drafter.sessions.text_group import TextSession
from speculation.messages import RetrievalQuery, StepReport
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.types import TokenTree

log = logging.getLogger(__name__)

Result = TypeVar("Result")


def hash_prefix(prefix: DraftedPrefix, tokens: Sequence[int]) -> None:
    prefix.hash = extend_hash(EMPTY_HASH, tokens)


def prepared(
    prepare: Callable[[], TextSession], max_nodes: int, look_up: bool
) -> tuple[TextSession, list[RetrievalQuery | None], TokenTree | None, float]:
    """The session; its queries, or its draft if there are none; and how long that took, in seconds."""
    start = time.perf_counter()
    text = prepare()
    queries = text.queries() if look_up else []
    tree = None if queries else text.draft(max_nodes)
    return text, queries, tree, time.perf_counter() - start


def observed(text: TextSession, report: StepReport) -> TextSession:
    text.observe(report)
    return text


def if_still(session: DraftedRequest, prefix: DraftedPrefix, function: Callable[[], Result]) -> Result | None:
    """The result of ``function``; None if the session has moved on to another prefix."""
    return function() if session.prefix is prefix else None


def logged(function: Callable[[], None]) -> None:
    """Run ``function`` and log what it raises, since nobody waits for it."""
    try:
        function()
    except Exception:
        log.exception("%s failed", function)
