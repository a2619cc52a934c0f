"""The drafts of one request that wait to be used, and whether waiting for more makes sense."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from speculation.messages import Draft
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.tree import descend, prune
from speculation.types import EMPTY_TREE, TokenTree

# Prefixes of so many steps are remembered, and so many drafts kept: several are sent ahead, for possible outcomes of a step.
_PREFIXES, _KEPT = 8, 64
# After so many steps in a row without a draft nobody waits any more, but for one step in a while.
_PATIENCE = 4
_RETRY_EVERY = 32


class Mailbox:
    """A small mailbox with a memory.

    Attributes:
        given_up: the drafter has said that there will be no drafts for this request.
        ahead: the drafter sends drafts ahead: what is missing need not be waited for.
        prefix_hash: of everything committed so far.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.given_up = False
        self.ahead = False
        self.prefix_hash = extend_hash(EMPTY_HASH, tokens)
        self._hashes = {len(tokens): self.prefix_hash}
        self._waiting: deque[Draft] = deque(maxlen=_KEPT)
        self._misses = 0
        self._none_for = -1
        self._reopened_for = -1

    def commit(self, length: int, tokens: Sequence[int]) -> None:
        """Note that ``tokens`` were appended, and the prefix is ``length`` long now."""
        self.prefix_hash = extend_hash(self.prefix_hash, tokens)
        # Mailbox may have been made from any of the last few prefixes (draft-ahead), never from much older ones.
        self._hashes[length] = self.prefix_hash
        if len(self._hashes) > _PREFIXES:
            del self._hashes[min(self._hashes)]

    def add(self, draft: Draft) -> None:
        """Keep a draft until its prefix is reached."""
        self._waiting.append(draft)
        self.ahead = self.ahead or bool(draft.assumed)

    def none_for(self, length: int) -> None:
        """There will be no draft for the prefix of this length."""
        self._none_for = length

    def failed(self, length: int, *, reopen: bool) -> bool:
        """Note that the drafter failed; whether to open its session anew, which is tried once per prefix."""
        self.none_for(length)
        if not reopen:
            self.given_up = True
        elif self._reopened_for != length:
            self._reopened_for = length
            self._none_for = -1
            return True
        return False

    def start_over(self) -> None:
        """A new drafter is there: nothing is held against it."""
        self.given_up, self.ahead = False, False
        self._misses, self._none_for, self._reopened_for = 0, -1, -1

    def ready(self, tokens: Sequence[int]) -> bool:
        """Whether a draft for what follows ``tokens`` is at hand."""
        return self._find(tokens) is not None

    def worth_waiting(self, tokens: Sequence[int]) -> bool:
        """Whether a draft for what follows ``tokens`` is missing and may still come in time."""
        patient = self._misses < _PATIENCE or self._misses % _RETRY_EVERY == 0
        return patient and not self.given_up and self._none_for != len(tokens) and not self.ready(tokens)

    def count_step(self, tokens: Sequence[int]) -> Draft | None:
        """Note whether the coming step has its draft, and give it."""
        found = self._best(tokens)
        self._misses = self._misses + 1 if found is None else 0
        return None if found is None else found[0]

    def take(self, tokens: Sequence[int], max_nodes: int, max_depth: int) -> TokenTree:
        """The newest tree that grows from exactly ``tokens``, or what is left of one that came too late, cut to what can be
        used; else the empty tree."""
        found = self._best(tokens)
        if found is None:
            return EMPTY_TREE
        tree = found[1]
        if tree.proposals and (len(tree) > max_nodes or max_depth < len(tree)):
            # Sampled tokens must not be left out by looking at them; by their number all of them may.
            return EMPTY_TREE
        return prune(tree, max_nodes, max_depth)

    def _best(self, tokens: Sequence[int]) -> tuple[Draft, TokenTree] | None:
        return self._find(tokens) or self._find_late(tokens)

    def _find(self, tokens: Sequence[int]) -> tuple[Draft, TokenTree] | None:
        for draft in reversed(self._waiting):
            since = self._since(draft, tokens)
            if since is not None and not since:
                return draft, draft.tree
        return None

    def _find_late(self, tokens: Sequence[int]) -> tuple[Draft, TokenTree] | None:
        """A tree whose first tokens have been committed meanwhile. Of sampled trees nothing may be left out by looking."""
        for draft in reversed(self._waiting):
            since = self._since(draft, tokens)
            if since and not draft.tree.proposals and (tree := descend(draft.tree, since)):
                return draft, tree
        return None

    def _since(self, draft: Draft, tokens: Sequence[int]) -> tuple[int, ...] | None:
        """What has been committed behind the prefix that a draft grows from; None if it grows from another one."""
        start = draft.base_length
        end = start + len(draft.assumed)
        if end > len(tokens) or self._hashes.get(start) != draft.base_hash or tuple(tokens[start:end]) != draft.assumed:
            return None
        return tuple(tokens[end:])
