"""One live request inside the decoding loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from speculation.acceptance import StopRule, stop_token_ids
from speculation.choose import LogitsPipeline
from speculation.messages import (
    Draft,
    Finished,
    GenerationRequest,
    OpenSession,
    Progress,
)
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.tree import prune
from speculation.types import EMPTY_TREE, FinishReason, TokenTree

# Drafts sent ahead, for several possible outcomes of a step, wait here; older ones are of no use.
_DRAFTS_KEPT = 8


class Session:
    """State of a request: what is committed, what is computed, which drafts wait.

    Attributes:
        tokens: prompt and answer so far. Its last one is pending: committed, but not computed.
        computed: tokens whose keys and values the target holds.
        events: what the consumer reads; ends in ``Finished`` or an exception.
        closed: nobody reads any more.
    """

    def __init__(
        self,
        request: GenerationRequest,
        pipeline: LogitsPipeline | None,
        eos_token_ids: frozenset[int],
        max_model_len: int,
    ) -> None:
        self.request = request
        self.pipeline = pipeline
        self.tokens = list(request.prompt)
        self.computed = 0
        self.events: asyncio.Queue[Progress | Finished | BaseException] = asyncio.Queue()
        self.closed = False
        self.submitted_at = time.perf_counter()
        self.queue_s = 0.0
        self._room = min(request.sampling.max_tokens, max_model_len - len(request.prompt))
        self._stop_ids = stop_token_ids(request.sampling, eos_token_ids)
        self._hashes = {len(self.tokens): extend_hash(EMPTY_HASH, self.tokens)}
        self._drafts: deque[Draft] = deque(maxlen=_DRAFTS_KEPT)

    @property
    def id(self) -> str:
        """The request's id; sessions with drafters carry it too."""
        return self.request.request_id

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def capacity(self) -> int:
        """Rows to reserve: every token that may come, and the largest tree behind them."""
        return len(self.request.prompt) + self._room + self.request.plan.max_nodes

    @property
    def prefix_hash(self) -> int:
        """Hash of ``tokens``."""
        return self._hashes[len(self.tokens)]

    @property
    def stop_rule(self) -> StopRule:
        """When the answer ends, from where it stands now."""
        return StopRule(stop_token_ids=self._stop_ids, generated=self.generated, room=self._room)

    def commit(self, tokens: tuple[int, ...]) -> None:
        """Append what a step decided."""
        prefix_hash = extend_hash(self.prefix_hash, tokens)
        self.tokens.extend(tokens)
        # Drafts may have been made from any of the last few prefixes (draft-ahead), never from much older ones.
        self._hashes[len(self.tokens)] = prefix_hash
        if len(self._hashes) > _DRAFTS_KEPT:
            del self._hashes[min(self._hashes)]

    def add_draft(self, draft: Draft) -> None:
        """Keep a draft until its prefix is reached."""
        self._drafts.append(draft)

    @property
    def has_draft(self) -> bool:
        """Whether a draft for the next step is at hand."""
        return any(self._fits(draft) for draft in self._drafts)

    def take_tree(self, max_nodes: int) -> TokenTree:
        """The newest tree that grows from exactly what is committed, cut to what can be used; else the empty tree."""
        draft = next((draft for draft in reversed(self._drafts) if self._fits(draft)), None)
        if draft is None:
            return EMPTY_TREE
        # The last token of the answer needs no row: nothing is chosen after it.
        max_depth = self._room - self.generated - 1
        nodes = min(max_nodes, self.request.plan.max_nodes)
        if draft.tree.proposals and (len(draft.tree) > nodes or max_depth < len(draft.tree)):
            return EMPTY_TREE
        return prune(draft.tree, nodes, max_depth)

    def _fits(self, draft: Draft) -> bool:
        start = draft.base_length
        return (
            start + len(draft.assumed) == len(self.tokens)
            and self._hashes.get(start) == draft.base_hash
            and tuple(self.tokens[start:]) == draft.assumed
        )

    def opening(self, max_nodes: int) -> OpenSession:
        """The message that starts a drafter's session, now or late."""
        return OpenSession(
            session_id=self.id,
            tokens=tuple(self.tokens),
            prompt_length=len(self.request.prompt),
            sources=self.request.plan.sources,
            max_nodes=min(max_nodes, self.request.plan.max_nodes),
            seed=self.request.sampling.seed,
            temperature=self.request.sampling.temperature,
        )

    def finish(self, reason: FinishReason) -> None:
        """End with an answer."""
        self.events.put_nowait(Finished(reason=reason))

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        self.events.put_nowait(error)
