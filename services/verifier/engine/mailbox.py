"""One origin's drafts for one request, and those still missing."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache

from services.verifier.engine.deciding.asking import Gain, Pace, Prices, gain_of_drafts
from services.verifier.engine.deciding.waiting import Experience, Worth
from services.verifier.engine.held_reports import HeldReports
from services.verifier.engine.prefixes import Prefixes
from services.verifier.engine.ready_draft import ReadyDraft, make_ready, rated, remainder
from speculation.messages import Draft

# Kept drafts. Drafters send several drafts ahead, for possible outcomes of a step.
_KEPT = 64
# Most drafts asked for at once: with more of them, a slow drafter would only fall further behind. A drafter that sends
# drafts ahead may have several. A draft that has not come after ``_LOST_S`` seconds counts as lost.
_MOST_ASKED, _MOST_ASKED_AHEAD, _LOST_S = 1, 4, 5.0
# Making a draft counts as taking at most so many passes.
_MOST_PASSES = 100
_NOTHING: Mapping[str, float] = {}


class Mailbox:
    """One origin's drafts for one request.

    Args:
        prefixes: the request's prefixes, which the request keeps up to date.
        experience: gives the statistics of a draft group over all requests.

    Attributes:
        given_up: the origin does not draft for this request any more, by its own word.
        ahead: the origin sends drafts ahead, so the remainder of a large draft may serve later steps.
        held: reports not sent to the origin yet; ``pace`` decides when they are.
        received: how many drafts of each group have come.
        rated: a draft of each group has, so that what others learn says nothing more of this request.
    """

    def __init__(self, prefixes: Prefixes, experience: Callable[[str], Experience]) -> None:
        self.given_up = False
        self.ahead = False
        self.held = HeldReports()
        self.pace = Pace()
        self.received: Counter[str] = Counter()
        self.rated = False
        self._prefixes = prefixes
        self._experience = cache(experience)
        self._kept: deque[ReadyDraft] = deque(maxlen=_KEPT)
        # When a draft was asked for, by prefix length. The first one's time is not counted: it includes opening the session.
        self._asked: OrderedDict[int, float] = OrderedDict()
        self._opened_at = self._answered = self._busy_at = -1
        # How many tokens of the draft asked for last were right.
        self._brought = 0
        # By group, for every group that has sent a draft.
        self._worth: dict[str, Worth] = {}
        # The groups that the session was opened for, unless the origin has others; these and all that have drafted.
        self._opened_for: tuple[str, ...] = ()
        self._groups: tuple[str, ...] = ("",)
        self._none_for = -1
        self._reopened_for = -1
        # What ``find`` found, and for how many tokens; None: anew. How many tokens that will bring; None: not asked.
        self._found: tuple[int, list[ReadyDraft]] | None = None
        self._bringing: float | None = None

    def opened(self, length: int, now: float, *, asks: bool = True, groups: Sequence[str] = ()) -> None:
        """Note that a session was opened with ``length`` tokens for sources in ``groups``; ``asks``: for a draft as well."""
        self._opened_at = length
        self._opened_for = tuple(groups)
        self._regroup()
        self.held.drop()
        self.pace.restart()
        if asks:
            self.asked(length, now)
        self.told(length)

    def asks(self, now: float) -> bool:
        """Whether another draft may be asked for now."""
        while self._asked and now - next(iter(self._asked.values())) > _LOST_S:
            self._asked.popitem(last=False)
        return self._unanswered < (_MOST_ASKED_AHEAD if self.ahead else _MOST_ASKED)

    def asked(self, length: int, now: float) -> None:
        """Note that a draft was asked for after a prefix of ``length`` tokens."""
        self._asked[length] = now
        self._brought = 0

    def told(self, length: int) -> None:
        """Note that the origin has been told of a prefix of ``length`` tokens."""
        self._busy_at = length

    def busy(self, length: int) -> bool:
        """Whether the origin had work while the prefix had ``length`` tokens: a report, or a draft asked for earlier."""
        return self._busy_at == length or self._unanswered > 0

    @property
    def _unanswered(self) -> int:
        return len([length for length in self._asked if length > self._answered])

    def gain(self, prices: Prices) -> Gain:
        """What another draft is expected to gain."""
        like_last, passes = -math.inf, 1
        drafted: list[tuple[Worth, float]] = []
        for group in self._groups:
            wait_s = 0.0 if self.ahead else self._experience(group).typical_s
            drafted.append((self.worth(group), wait_s))
            like_last = max(like_last, prices.gain_s(self._brought, wait_s))
            passes = max(passes, math.ceil(min(wait_s / prices.pass_s, _MOST_PASSES)))
        average = gain_of_drafts(drafted, prices)
        return Gain(average_s=average, like_last_s=like_last, passes=passes)

    def add(self, draft: Draft, tokens: Sequence[int], most: int, now: float) -> None:
        """Store a draft, and measure how long it took. If it is late, count how many of its tokens were right.

        Args:
            tokens: all committed tokens.
            most: most tokens that a draft is credited with.
            now: arrival time, in seconds of the event loop's clock.
        """
        group, base, length = draft.group, draft.base_length, len(tokens)
        experience = self._experience(group)
        experience.spoke()
        self.received[group] += 1
        worth = self._worth.get(group)
        if worth is None:
            worth = self._worth[group] = experience.worth.copy()
            if group not in self._opened_for:
                self._opened_for = ()
            self._regroup()
        self.ahead = self.ahead or bool(draft.assumed)
        self._busy_at = length
        known = self._prefixes.known(draft)
        if known and base > self._answered:
            self._answered = base
        asked_for = None if draft.assumed else base if base in self._asked else self._asked_earlier(draft, known)
        asked_at = None if asked_for is None else self._asked[asked_for]
        if asked_for is not None and asked_at is not None:
            if base != self._opened_at and not draft.unready:
                experience.came(now - asked_at)
            if not draft.more:
                del self._asked[asked_for]
            if base < length and not draft.unready and (since := self._prefixes.since(draft, tokens)):
                right, left = rated(draft.tree, since)
                self._brought = min(most, right)
                for each in (experience.worth, worth):
                    each.learn(self._brought, late=False)
                    # A remainder is rated by the steps that it serves. Without one, no step will.
                    if not left:
                        each.learn(0.0, late=True)
        asked = asked_at is not None and not draft.unready
        # Mostly it is the only one, and for the coming step: what ``find`` would find.
        alone = known and base == length and not draft.assumed and not self._kept
        ready = make_ready(draft=draft, tree=draft.tree, late=False, asked=asked, at=now)
        self._kept.append(ready)
        self._bringing = None
        self._found = (length, [ready]) if alone else None

    def add_next(self, draft: Draft, length: int, now: float, took: list[float]) -> bool:
        """As ``add``, of what nearly every draft is: the one that was asked for after all ``length`` tokens, with no other
        at hand. False: it is another one, and nothing was done.

        Args:
            took: gets the seconds for ``Experience.came``, which is told of several drafts together.
        """
        group, asked_at = draft.group, self._asked.get(length)
        if asked_at is None or draft.base_length != length or draft.base_hash != self._prefixes.hash:
            return False
        if self._kept or group not in self._worth or draft.assumed or draft.more or draft.unready:
            return False
        self._experience(group).spoke()
        if length != self._opened_at:
            took.append(now - asked_at)
        self.received[group] += 1
        self._busy_at = length
        if length > self._answered:
            self._answered = length
        del self._asked[length]
        ready = make_ready(draft=draft, tree=draft.tree, late=False, asked=True, at=now)
        self._kept.append(ready)
        self._bringing = None
        self._found = length, [ready]
        return True

    def _asked_earlier(self, draft: Draft, known: bool) -> int | None:
        """The length of an earlier prefix for which the draft was asked; None if it was not.

        A drafter may hear of a longer prefix before it begins, and draft for that one.
        """
        if not len(draft.tree) or not known:
            return None
        return next((length for length in reversed(self._asked) if length < draft.base_length), None)

    def none_for(self, length: int) -> None:
        """Note that no draft will come for the prefix of ``length`` tokens."""
        self._none_for = length
        self._asked.pop(length, None)
        self._answered = max(self._answered, length)

    def failed(self, length: int, *, reopen: bool) -> bool:
        """Note that drafting failed. Returns whether to reopen the session, which is tried once per prefix.

        Args:
            length: committed tokens now.
            reopen: whether the drafter wants its session reopened. If not, it drafts no more for this request.
        """
        for group in self._groups:
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
        """Reset for a new session: earlier failures and unanswered requests no longer count."""
        self.given_up, self.ahead = False, False
        self._none_for = self._reopened_for = self._answered = self._busy_at = -1
        self._asked.clear()

    def leave_out(self, groups: Collection[str]) -> None:
        """Drop the drafts of these groups, and expect no more of them."""
        for group in groups:
            self._worth.pop(group, None)
        self._opened_for = tuple(group for group in self._opened_for if group not in groups)
        self._regroup()
        self._kept = deque((kept for kept in self._kept if kept.draft.group not in groups), maxlen=_KEPT)
        self._found = None
        self.start_over()

    def missing(self, tokens: Sequence[int]) -> Mapping[str, float]:
        """Groups whose draft after ``tokens`` may still arrive, with the time it was asked for."""
        length = len(tokens)
        at = self._asked.get(length)
        if at is None or self.given_up or self._none_for == length:
            return _NOTHING
        known = self._found
        at_hand = known[1] if known is not None and known[0] == length else self.find(tokens)
        if not at_hand:
            return dict.fromkeys(self._groups, at)
        there = [found.draft.group for found in at_hand if not found.late]
        return {group: at for group in self._groups if group not in there}

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups whose drafts are expected; an empty name stands for those of an origin that has named none."""
        return self._groups

    def refused(self, length: int) -> bool:
        """Whether the origin has said that no draft will come for the prefix of ``length`` tokens."""
        return self._none_for == length

    def _regroup(self) -> None:
        self._groups = tuple({**dict.fromkeys(self._worth), **dict.fromkeys(self._opened_for)}) or ("",)
        self.rated = all(group in self._worth for group in self._groups)

    def worth(self, group: str) -> Worth:
        """How many tokens a group's drafts get accepted in this request; over all requests if it had none here yet."""
        return self._worth.get(group) or self._experience(group).worth

    def find(self, tokens: Sequence[int]) -> list[ReadyDraft]:
        """The newest usable draft of every group: one that starts after exactly ``tokens``, else the rest of a late one.

        Args:
            tokens: all committed tokens, of which there are only ever more.
        """
        # A step asks several times.
        found, length = self._found, len(tokens)
        if found is None or found[0] != length:
            found = self._found = length, self._find(tokens)
            self._bringing = None
        return found[1]

    def expected(self, tokens: Sequence[int]) -> float:
        """Expected number of accepted tokens of the best draft that ``find`` finds."""
        known = self._found
        found = known[1] if known is not None and known[0] == len(tokens) else self.find(tokens)
        if not found:
            return 0.0
        if self._bringing is None:
            # What a draft at hand is worth changes with the next one, or with the next tokens.
            worths = [self.worth(each.draft.group).of(late=each.late) for each in found if each.tree.tokens]
            self._bringing = max(worths, default=0.0)
        return self._bringing

    def _find(self, tokens: Sequence[int]) -> list[ReadyDraft]:
        exact: dict[str, ReadyDraft] = {}
        late: dict[str, ReadyDraft] = {}
        gone: list[ReadyDraft] = []
        for kept in reversed(self._kept):
            draft, group = kept.draft, kept.draft.group
            if group in exact:
                continue
            since = self._prefixes.since(draft, tokens)
            if since is None or (since and group in late):
                continue
            if not since:
                exact[group] = kept
            elif tree := remainder(draft.tree, since):
                late[group] = make_ready(draft=draft, tree=tree, late=True, asked=kept.asked, at=kept.at)
            else:
                # The text went elsewhere, or past its end.
                gone.append(kept)
        for kept in gone:
            self._kept.remove(kept)
        return [*exact.values(), *(found for group, found in late.items() if group not in exact)]

    def learn(self, tokens: Sequence[int], committed: Sequence[int], most: int) -> None:
        """Rate the drafts at hand by how many tokens of ``committed`` they predicted, at most ``most`` each.

        This rates unverified drafts as well: the target's tokens do not depend on the tree.

        Args:
            tokens: committed before the step.
            committed: the step's tokens.
        """
        at_hand = self.find(tokens)
        over = len(at_hand) == len(self._kept)
        for found in at_hand:
            right, remains = rated(found.tree, committed)
            over = over and not remains
            if found.asked:
                self._learn(found, right if right < most else most, remains=remains)
        if over:
            self._lay_aside(len(tokens) + len(committed))

    def only(self, tokens: Sequence[int]) -> ReadyDraft | None:
        """The one draft that ``find`` finds, if its tree is all there is to rate; None: there is none, or more."""
        known = self._found
        found = known[1] if known is not None and known[0] == len(tokens) else self.find(tokens)
        if len(found) != 1 or found[0].tree.probes or found[0].tree.proposals:
            return None
        return found[0]

    def learn_of(self, found: ReadyDraft, length: int, right: int, most: int, *, remains: bool) -> None:
        """As ``learn`` where ``found`` is the ``only`` draft at hand: rated is it already.

        Args:
            length: tokens from now on.
            right, remains: what ``follow_on`` says of it.
        """
        if found.asked:
            self._learn(found, right if right < most else most, remains=remains)
        if not remains and len(self._kept) == 1:
            self._lay_aside(length)

    def _learn(self, found: ReadyDraft, brought: int, *, remains: bool) -> None:
        group = found.draft.group
        if brought > self._brought:
            self._brought = brought
        everywhere, here = self._experience(group).worth, self._worth[group]
        if found.late:
            everywhere.late.include(brought)
            here.late.include(brought)
            return
        everywhere.in_time.include(brought)
        here.in_time.include(brought)
        if not remains:
            # A step later it would have brought one token less. A remainder is rated by the next step instead.
            later = brought - 1 if brought else 0
            everywhere.late.include(later)
            here.late.include(later)

    def _lay_aside(self, length: int) -> None:
        """Note that no draft at hand is of use after ``length`` tokens: ``find`` would look through all for nothing."""
        self._kept.clear()
        self._found = length, []

    def drop_old(self) -> None:
        """Drop the oldest drafts while their prefix is no longer remembered."""
        while self._kept and not self._prefixes.known(self._kept[0].draft):
            self._kept.popleft()
            self._found = None
