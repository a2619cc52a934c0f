"""How often each stretch of some texts occurred, and what came next: a suffix automaton, counted, in flat arrays.

Stretches that end in the same places are one state (Blumer et al., 1985, The smallest automaton recognizing the subwords of
a text), so a token adds two states at most, and none where the text repeats itself. Stretches are at most ``depth`` tokens
long: adding a token takes a number of operations that does not grow with the text. A text can be taken back: its stretches
are uncounted, but their states stay until the automaton itself goes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

# Stands between two texts: no stretch reaches over it.
BREAK = -1
# An ending: its state, and how many tokens it has. The one that occurs nowhere is (0, 0).
Ending = tuple[int, int]
NOWHERE: Ending = (0, 0)

# Followers of a state: none yet, or so many that they have a dictionary; else the state of the one.
_NONE, _SEVERAL = 0, -1
# States with more followers than this keep their likeliest ones at hand once they were asked for.
_MANY = 16


class Automaton:
    """See the module. State 0 is the empty stretch.

    Args:
        depth: tokens of the longest stretch that is counted.
        likeliest: followers of a state that can be asked for.
    """

    def __init__(self, depth: int, likeliest: int) -> None:
        self._depth = depth
        self._likeliest = likeliest
        # Of each state: tokens of its longest stretch, the state of that stretch's longest ending that occurs elsewhere too,
        # how often it occurred, and when it did first.
        self._length = array("i", [0])
        self._link = array("i", [0])
        self._count = array("i", [0])
        self._first = array("i", [0])
        # The follower and where it leads, where there is one; else all of them.
        self._token = array("i", [BREAK])
        self._target = array("i", [_SEVERAL])
        self._followers: dict[int, dict[int, int]] = {0: {}}
        # Of states with many followers: how often anything followed, and the likeliest, in their order.
        self._best: dict[int, tuple[int, list[int]]] = {}
        self._time = 0
        # Where the text that grows, and the one that is taken back, have got to.
        self._head = self._tail = NOWHERE

    @property
    def states(self) -> int:
        """How many there are, those of uncounted stretches included."""
        return len(self._length)

    @property
    def head(self) -> Ending:
        """The longest ending of what was added last; nothing has followed it where it occurred only there."""
        return self._head

    def add(self, tokens: Iterable[int]) -> None:
        """Count every stretch that ends in one of these tokens, which follow what was added before."""
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
        """Uncount what was added first and not removed yet: these tokens."""
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

    def find(self, tokens: Iterable[int]) -> Ending:
        """The longest ending of ``tokens`` that occurs."""
        ending = NOWHERE
        for token in tokens:
            ending = self.follow(ending, token)
        return ending

    def follow(self, ending: Ending, token: int) -> Ending:
        """The longest ending of ``ending`` and ``token`` that occurs."""
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
        """The state of the ending of ``size`` tokens of a state's stretches, which are as long or longer."""
        length, link = self._length, self._link
        while state and length[link[state]] >= size:
            state = link[state]
        return state

    def followers(self, state: int) -> list[tuple[int, int, int]]:
        """What came next, the likeliest first, of equals the earliest: token, how often it came, how often anything did."""
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
        """Where ``token`` leads, whether it still counts or not; 0: it never followed."""
        target = self._target[state]
        if target == _SEVERAL:
            return self._followers[state].get(token, _NONE)
        return target if self._token[state] == token else _NONE

    def _lead(self, state: int, token: int, target: int) -> None:
        """Let ``token`` lead from a state to another."""
        now = self._target[state]
        if now == _SEVERAL:
            self._followers[state][token] = target
        elif now == _NONE or self._token[state] == token:
            self._token[state], self._target[state] = token, target
        else:
            self._followers[state] = {self._token[state]: now, token: target}
            self._target[state] = _SEVERAL

    def _extended(self, state: int, size: int, token: int) -> int:
        """The state of a state's stretch of ``size`` tokens with ``token`` behind it, made where there is none yet."""
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
        """Give the stretches of ``old`` of at most ``size`` tokens a state of their own: they will occur without the longer.

        Args:
            state: of the longest stretch that ``token`` makes one of them.
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
        """Rank the followers of a state; from now on that is kept up."""
        count, first, followers = self._count, self._first, self._followers[state]
        order = sorted((-count[target], first[target], token) for token, target in followers.items() if count[target])
        total = -sum(often for often, _, _ in order)
        self._best[state] = total, [token for _, _, token in order[: self._likeliest]]
        return self._best[state]

    def _rank(self, state: int, token: int) -> None:
        """``token`` has followed a state once more, and so all its endings: keep up the likeliest followers of them all."""
        while state:
            if (known := self._best.get(state)) is not None:
                total, likeliest = known
                followers = self._followers[state]
                if token not in likeliest:
                    likeliest.append(token)
                likeliest.sort(key=lambda each: (-self._count[followers[each]], self._first[followers[each]]))
                self._best[state] = total + 1, likeliest[: self._likeliest]
            state = self._link[state]
