"""The drafts of one request that have come from one origin, and which of those asked for are missing."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.verifier.engine.waiting import Experience, Worth
from speculation.messages import Draft
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.tree import descend, follow
from speculation.types import TokenTree

# Prefixes of so many steps are remembered, and so many drafts kept: several are sent ahead, for possible outcomes of a step.
_PREFIXES, _KEPT = 8, 64
# As long as a report is not answered, the next ones ask for nothing: a slow drafter would only fall farther behind. From far
# away drafts come ahead, and so many reports may be under way. What has not come for so long is lost.
_MOST_ASKED, _MOST_ASKED_AHEAD, _LOST_S = 1, 4, 5.0


class Prefixes:
    """Hashes of what was committed by the last few steps: what a draft may grow from.

    Attributes:
        hash: of everything committed so far.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.hash = extend_hash(EMPTY_HASH, tokens)
        self._hashes = {len(tokens): self.hash}

    def commit(self, length: int, tokens: Sequence[int]) -> None:
        """Note that ``tokens`` were appended, and the prefix is ``length`` long now."""
        self.hash = extend_hash(self.hash, tokens)
        # Drafts may have been made from any of the last few prefixes (draft-ahead), never from much older ones.
        self._hashes[length] = self.hash
        if len(self._hashes) > _PREFIXES:
            del self._hashes[min(self._hashes)]

    def known(self, draft: Draft) -> bool:
        """Whether a draft grows from one of them."""
        return self._hashes.get(draft.base_length) == draft.base_hash

    def since(self, draft: Draft, tokens: Sequence[int]) -> tuple[int, ...] | None:
        """What has been committed behind the prefix that a draft grows from; None if it grows from another one."""
        end = draft.base_length + len(draft.assumed)
        if end > len(tokens) or not self.known(draft) or tuple(tokens[draft.base_length : end]) != draft.assumed:
            return None
        return tuple(tokens[end:])


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyDraft:
    """What may be checked of a draft: its tree, or what is left of it where some of its tokens have been committed.

    Attributes:
        late: whether only what is left.
        asked: whether it answers a report that asked for nodes.
        at: when it came, on the loop's clock.
    """

    draft: Draft
    tree: TokenTree
    late: bool
    asked: bool
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    draft: Draft
    asked: bool
    at: float


class Mailbox:
    """What one origin has sent for one request.

    Args:
        prefixes: the request's; whoever commits notes it there.
        experience: what is known of a group's drafts over all requests.

    Attributes:
        given_up: the origin has said that there will be no drafts for this request.
        ahead: it sends drafts ahead: what is left of a large one serves later steps, too.
    """

    def __init__(self, prefixes: Prefixes, experience: Callable[[str], Experience]) -> None:
        self.given_up = False
        self.ahead = False
        self._prefixes = prefixes
        self._experience = experience
        self._kept: deque[_Kept] = deque(maxlen=_KEPT)
        # When a draft was asked for, by the prefix's length. The first one opens a session and says nothing of later ones.
        self._asked: OrderedDict[int, float] = OrderedDict()
        self._opened_at = self._answered = -1
        # By group, all groups that have ever sent anything.
        self._worth: dict[str, Worth] = {}
        self._none_for = -1
        self._reopened_for = -1

    def opened(self, length: int, now: float) -> None:
        """The origin has been told of the request, when it had ``length`` tokens."""
        self._opened_at = length
        self._asked[length] = now

    def asks(self, now: float) -> bool:
        """Whether a draft more may be asked for."""
        while self._asked and now - next(iter(self._asked.values())) > _LOST_S:
            self._asked.popitem(last=False)
        unanswered = sum(length > self._answered for length in self._asked)
        return unanswered < (_MOST_ASKED_AHEAD if self.ahead else _MOST_ASKED)

    def asked(self, length: int, now: float) -> None:
        """A report has gone out that asks for nodes behind the prefix of this length."""
        self._asked[length] = now

    def add(self, draft: Draft, tokens: Sequence[int], most: int, now: float) -> None:
        """Keep a draft until its prefix is reached.

        Args:
            tokens: what is committed now.
            most: tokens that a draft may be credited with.
        """
        experience = self._experience(draft.group)
        experience.spoke()
        worth = self._worth.setdefault(draft.group, experience.worth.copy())
        self.ahead = self.ahead or bool(draft.assumed)
        if self._prefixes.known(draft):
            self._answered = max(self._answered, draft.base_length)
        asked_at = None if draft.assumed else self._asked.get(draft.base_length)
        if asked_at is not None:
            if draft.base_length != self._opened_at:
                experience.came(now - asked_at)
            if not draft.more:
                del self._asked[draft.base_length]
            if since := self._prefixes.since(draft, tokens):
                brought = min(most, follow(draft.tree, since))
                for each in (experience.worth, worth):
                    each.learn(brought, late=False)
        self._kept.append(_Kept(draft=draft, asked=asked_at is not None, at=now))

    def none_for(self, length: int) -> None:
        """There will be no draft for the prefix of this length."""
        self._none_for = length
        self._asked.pop(length, None)
        self._answered = max(self._answered, length)

    def failed(self, length: int, *, reopen: bool) -> bool:
        """Note that the drafter failed; whether to open its session anew, which is tried once per prefix."""
        for group in self._worth or ("",):
            self._experience(group).spoke()
        self.none_for(length)
        if not reopen:
            self.given_up = True
        elif self._reopened_for != length:
            self._reopened_for = length
            self._none_for = -1
            return True
        return False

    def start_over(self) -> None:
        """A session is opened anew: nothing is held against it, and what was asked for before is not coming."""
        self.given_up, self.ahead = False, False
        self._none_for = self._reopened_for = self._answered = -1
        self._asked.clear()

    def missing(self, tokens: Sequence[int]) -> dict[str, float]:
        """Groups of which a draft for what follows ``tokens`` has not come and may, and when it was asked for."""
        at = self._asked.get(len(tokens))
        if at is None or self.given_up or self._none_for == len(tokens):
            return {}
        there = {found.draft.group for found in self.find(tokens) if not found.late}
        return {group: at for group in self._worth or ("",) if group not in there}

    def worth(self, group: str) -> Worth:
        """What a group's drafts have brought this request, or others where it had none yet."""
        return self._worth.get(group) or self._experience(group).worth

    def find(self, tokens: Sequence[int]) -> list[ReadyDraft]:
        """Of every group the newest draft that grows from exactly ``tokens``, or what is left of one that came too late."""
        exact: dict[str, ReadyDraft] = {}
        late: dict[str, ReadyDraft] = {}
        for kept in reversed(self._kept):
            draft, group = kept.draft, kept.draft.group
            since = self._prefixes.since(draft, tokens)
            if since is None or group in (late if since else exact):
                continue
            if not since:
                exact[group] = ReadyDraft(draft=draft, tree=draft.tree, late=False, asked=kept.asked, at=kept.at)
            elif not draft.tree.proposals and (tree := descend(draft.tree, since)):
                # Of sampled trees nothing may be left out by looking.
                late[group] = ReadyDraft(draft=draft, tree=tree, late=True, asked=kept.asked, at=kept.at)
        return [*exact.values(), *(found for group, found in late.items() if group not in exact)]

    def learn(self, tokens: Sequence[int], committed: Sequence[int], most: int) -> None:
        """``committed`` has followed ``tokens``: how much of it did the drafts say, at most ``most`` tokens each?

        That is known of drafts that were not checked, too: no tree changes what the target says.
        """
        for found in self.find(tokens):
            if found.asked:
                group = found.draft.group
                brought = min(most, follow(found.tree, committed))
                for each in (self._experience(group).worth, self._worth[group]):
                    each.learn(brought, late=found.late)

    def drop_old(self) -> None:
        """Forget drafts whose prefix is out of reach."""
        while self._kept and not self._prefixes.known(self._kept[0].draft):
            self._kept.popleft()
