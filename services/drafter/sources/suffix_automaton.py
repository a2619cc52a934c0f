"""How often each n-gram of some texts occurred, and what came next: a suffix automaton with counts, in flat arrays.

N-grams that end at the same places are one state (Blumer et al., 1985, The smallest automaton recognizing the subwords of
a text). So a token adds at most two states, and none where the text repeats itself. N-grams have at most ``depth`` tokens,
so the cost of adding a token does not grow with the text. A text can be removed: its n-grams are uncounted, but their
states stay until the automaton itself is dropped.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

# Separates two texts: no n-gram spans it.
BREAK = -1
# A suffix of a text: its state and its number of tokens. (0, 0) is the empty one: nothing longer occurs.
Ending = tuple[int, int]
NOWHERE: Ending = (0, 0)

# Special values of ``_target``, which otherwise is the state that the only follower leads to: no follower, or several, which
# are in a dictionary.
_NONE, _SEVERAL = 0, -1
# States with more followers than this cache their likeliest ones, once these have been asked for.
_MANY = 16


class Automaton:
    """The counted suffix automaton of the module's docstring. State 0 is the empty n-gram.

    Args:
        depth: tokens of the longest n-gram that is counted.
        likeliest: most followers of a state that ``followers`` returns.

    Attributes:
        changes: how often tokens were counted or uncounted: as long as it stays, so does what ``find`` finds.
    """

    def __init__(self, depth: int, likeliest: int) -> None:
        self._depth = depth
        self._likeliest = likeliest
        # Of each state: tokens of its longest n-gram; its suffix link, the state of that n-gram's longest suffix that also
        # ends elsewhere; how often it occurred; and the time of its first occurrence.
        self._length = array("i", [0])
        self._link = array("i", [0])
        self._count = array("i", [0])
        self._first = array("i", [0])
        # The only follower and the state that it leads to; of several, all of them.
        self._token = array("i", [BREAK])
        self._target = array("i", [_SEVERAL])
        self._followers: dict[int, dict[int, int]] = {0: {}}
        # Cache of states with many followers: how often anything followed, and the likeliest followers in order.
        self._best: dict[int, tuple[int, list[int]]] = {}
        self._time = 0
        self.changes = 0
        # How far the text has been added, and how far removed.
        self._head = self._tail = NOWHERE

    @property
    def states(self) -> int:
        """Number of states, those of uncounted n-grams included."""
        return len(self._length)

    @property
    def head(self) -> Ending:
        """The longest counted suffix of the text added so far; if it occurs only there, it has no follower."""
        return self._head

    def add(self, tokens: Iterable[int]) -> None:
        """Count every n-gram that ends in one of these tokens, which continue the text added so far."""
        self.changes += 1
        length, link, count, first = self._length, self._link, self._count, self._first
        state, size = self._head
        for token in tokens:
            if token == BREAK:
                state, size = NOWHERE
                continue
            if size == self._depth:
                size -= 1
                if length[link[state]] == size:
                    state = link[state]
            before, state, size = state, self._extended(state, size, token), size + 1
            self._time += 1
            each = state
            while each:
                if not count[each]:
                    first[each] = self._time
                count[each] += 1
                each = link[each]
            if self._best:
                self._rank(self.shortened(before, size - 1), token)
        self._head = state, size

    def remove(self, tokens: Iterable[int]) -> None:
        """Uncount the oldest tokens that are still counted, which must be these."""
        self.changes += 1
        count, link = self._count, self._link
        state, size = self._tail
        for token in tokens:
            if token == BREAK:
                state, size = NOWHERE
                continue
            size = min(size, self._depth - 1)
            before = self.shortened(state, size)
            size += 1
            each = state = self.shortened(self._follower(before, token), size)
            while each:
                count[each] -= 1
                each = link[each]
            while before:
                self._best.pop(before, None)
                before = link[before]
        self._tail = state, size

    def find(self, tokens: Iterable[int], ending: Ending = NOWHERE) -> Ending:
        """The longest suffix of ``ending`` followed by ``tokens`` that occurs."""
        for token in tokens:
            ending = self.follow(ending, token)
        return ending

    def follow(self, ending: Ending, token: int) -> Ending:
        """The longest suffix of ``ending`` followed by ``token`` that occurs."""
        state, size = ending
        while True:
            target = self._target[state]
            if target == _SEVERAL:
                target = self._followers[state].get(token, _NONE)
            elif self._token[state] != token:
                target = _NONE
            if target and self._count[target]:
                return target, min(size + 1, self._depth)
            if not state:
                return NOWHERE
            state = self._link[state]
            size = self._length[state]

    def shortened(self, state: int, size: int) -> int:
        """The state of the last ``size`` tokens of ``state``'s n-grams, the longest of which has at least ``size``."""
        length, link = self._length, self._link
        while state and length[link[state]] >= size:
            state = link[state]
        return state

    def shorter(self, state: int) -> int:
        """Tokens of the longest suffix of ``state``'s n-grams that is of another state."""
        return self._length[self._link[state]] if state else -1

    def count(self, state: int) -> int:
        """How often ``state``'s n-grams occurred."""
        return self._count[state]

    def followers(self, state: int) -> list[tuple[int, int, int]]:
        """What followed, the most frequent first, of equals the earliest: token, its count, count of all followers."""
        target = self._target[state]
        if target != _SEVERAL:
            often = self._count[target]
            return [(self._token[state], often, often)] if often else []
        followers, count = self._followers[state], self._count
        if len(followers) > _MANY:
            total, likeliest = self._best.get(state) or self._remember(state)
            return [(token, count[followers[token]], total) for token in likeliest]
        total = sum([count[target] for target in followers.values()])
        first = self._first
        order = sorted([(-count[target], first[target], token) for token, target in followers.items() if count[target]])
        return [(token, -often, total) for often, _, token in order[: self._likeliest]]

    def _follower(self, state: int, token: int) -> int:
        """The state that ``token`` leads to, counted or not; 0 if it never followed."""
        target = self._target[state]
        if target == _SEVERAL:
            return self._followers[state].get(token, _NONE)
        return target if self._token[state] == token else _NONE

    def _lead(self, state: int, token: int, target: int) -> None:
        """Make ``token`` lead from ``state`` to ``target``."""
        now = self._target[state]
        if now == _SEVERAL:
            self._followers[state][token] = target
        elif now == _NONE or self._token[state] == token:
            self._token[state], self._target[state] = token, target
        else:
            self._followers[state] = {self._token[state]: now, token: target}
            self._target[state] = _SEVERAL

    def _extended(self, state: int, size: int, token: int) -> int:
        """The state of ``state``'s n-gram of ``size`` tokens followed by ``token``; it is made if there is none yet."""
        found = self._follower(state, token)
        if found:
            return found if self._length[found] == size + 1 else self._split(state, token, found, size + 1)
        made = self._new(size + 1)
        while True:
            self._lead(state, token, made)
            if not state:
                return made
            state = self._link[state]
            found = self._follower(state, token)
            if found:
                longest = self._length[state] + 1
                self._link[made] = found if self._length[found] == longest else self._split(state, token, found, longest)
                return made

    def _split(self, state: int, token: int, old: int, size: int) -> int:
        """Give the n-grams of ``old`` with at most ``size`` tokens a state of their own: they now occur without longer ones.

        Args:
            state: the state of the n-gram that, followed by ``token``, is the longest of them.
        """
        made = self._new(size)
        self._link[made], self._count[made], self._first[made] = self._link[old], self._count[old], self._first[old]
        self._token[made], self._target[made] = self._token[old], self._target[old]
        if self._target[old] == _SEVERAL:
            self._followers[made] = self._followers[old].copy()
        self._link[old] = made
        while self._follower(state, token) == old:
            self._lead(state, token, made)
            state = self._link[state]
        return made

    def _new(self, length: int) -> int:
        made = len(self._length)
        self._length.append(length)
        for each in (self._link, self._count, self._first, self._target):
            each.append(0)
        self._token.append(BREAK)
        return made

    def _remember(self, state: int) -> tuple[int, list[int]]:
        """Rank the followers of a state; ``add`` keeps the ranking up to date."""
        count, first, followers = self._count, self._first, self._followers[state]
        order = sorted((-count[target], first[target], token) for token, target in followers.items() if count[target])
        total = -sum(often for often, _, _ in order)
        self._best[state] = total, [token for _, _, token in order[: self._likeliest]]
        return self._best[state]

    def _rank(self, state: int, token: int) -> None:
        """Update the rankings after ``token`` has followed a state once more, and with it all its suffixes."""
        while state:
            if (known := self._best.get(state)) is not None:
                total, likeliest = known
                followers = self._followers[state]
                if token not in likeliest:
                    likeliest.append(token)
                likeliest.sort(key=lambda each: (-self._count[followers[each]], self._first[followers[each]]))
                self._best[state] = total + 1, likeliest[: self._likeliest]
            state = self._link[state]
