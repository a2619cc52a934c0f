"""Suffix decoding: drafts what most often followed the longest suffixes of the text (Oliaro et al., SuffixDecoding, 2024).

All n-grams of at most ``depth`` tokens are counted, in the request itself and in earlier answers to its tenant. If a suffix
of the text has occurred before, the counts say what came next, and how often. The longest suffix with a follower is asked
first, then shorter ones. Texts are counted a piece at a time, prompts included; what is not yet counted is not found.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakValueDictionary

from services.drafter.config import DrafterConfig, SuffixConfig
from services.drafter.native.automaton import CompiledAutomaton
from services.drafter.sources.suffix_automaton import BREAK, NOWHERE, Automaton, Ending
from services.drafter.sources.suffix_memory import Memory
from speculation.messages import OpenSession, StepReport

NAME = "suffix"

# Kinds of candidates: by the text's owner, the suffix's length, how often the token followed it, and in what share of cases.
_WHOSE = ("own", "shared")
_LENGTHS = (1, 2, 3, 4, 6, 9, 13)
_COUNTS = (1, 2, 4)
_SHARES = (0.0, 0.2, 0.4, 0.7, 0.95)
# Their prior probabilities are products of these (measured on a small chat model).
_BY_LENGTH = (0.33, 0.5, 0.67, 0.72, 0.8, 0.85, 0.9)
_BY_SHARE = (0.07, 0.25, 0.35, 0.65, 1.0)
# Most followers of one suffix that are considered.
_MOST_FOLLOWERS = 4
# Tokens that one call counts, in two or three milliseconds.
_PIECE = 1024
# New tokens with which an answer is told to those beside it, and tokens of a group whose tenant's answers are not kept.
_TOLD, _GROUP_TOKENS = 16, 65_536

# The longest known suffix of a text in the request itself, and in its tenant's answers.
Place = tuple[Ending, Ending]


def _kind(whose: str, length: int, count: int, share: int) -> str:
    return f"{whose}:{_LENGTHS[length]}:{_COUNTS[count]}:{_SHARES[share]}"


_KINDS = [
    [[[_kind(t, x, c, s) for s in range(len(_SHARES))] for c in range(len(_COUNTS))] for x in range(len(_LENGTHS))]
    for t in _WHOSE
]
PRIOR = {
    _kind(t, x, c, s): _BY_LENGTH[x] * _BY_SHARE[s]
    for t in _WHOSE
    for x in range(len(_LENGTHS))
    for c in range(len(_COUNTS))
    for s in range(len(_SHARES))
}
# Kinds by their number in compiled code.
_NAMES = tuple(PRIOR)


class _Answers:
    """A tenant's earlier answers. Beyond a number of tokens the oldest are forgotten, and after a time all."""

    def __init__(self, config: SuffixConfig, clock: Callable[[], float]) -> None:
        self.memory = Memory(config.depth, _MOST_FOLLOWERS)
        self._config = config
        self._clock = clock
        # Of each answer: its time, its number of tokens, and the position of its end in ``memory``.
        self._texts: deque[tuple[float, int, int]] = deque()
        self._tokens = 0

    def add(self, text: Sequence[int]) -> None:
        """Remember an answer; of one longer than the limit, only its end."""
        kept = text[-self._config.max_cached_tokens :]
        self.memory.add((*kept, BREAK))
        self._texts.append((self._clock(), len(kept), self.memory.end))
        self._tokens += len(kept)
        self.tidy()

    def tidy(self) -> None:
        """Forget answers beyond the limits."""
        oldest_allowed = self._clock() - self._config.cached_s
        while self._texts and (self._tokens > self._config.max_cached_tokens or self._texts[0][0] < oldest_allowed):
            _, tokens, end = self._texts.popleft()
            self._tokens -= tokens
            self.memory.forget(end)


def make(config: DrafterConfig) -> Suffix:
    """For ``catalogue.MAKERS``."""
    return Suffix(config.suffix)


class Suffix:
    """SuffixDecoding's two memories, the request's own and its tenant's. Tenants share nothing, nor do their adapters."""

    prior = PRIOR

    def __init__(self, config: SuffixConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        # By tenant and adapter.
        self._answers: OrderedDict[tuple[str, str], _Answers] = OrderedDict()
        # By tenant, adapter and group: what answers written side by side tell each other. It goes with the last.
        self._groups: WeakValueDictionary[tuple[str | None, str, str], _Answers] = WeakValueDictionary()

    def open(self, message: OpenSession) -> SuffixSession:
        answers = self._of(message.tenant, message.adapter)
        if message.group:
            beside = message.tenant, message.adapter, message.group
            answers = self._groups.setdefault(beside, self._beside(answers))
        left = _PIECE
        for each in self._answers.values():
            each.tidy()
            left = each.memory.work(left)
        return SuffixSession(self._config, answers, message)

    def _beside(self, of_tenant: _Answers) -> _Answers:
        """Answers for a group: its tenant's, where those are kept."""
        if self._config.max_cached_tokens:
            return of_tenant
        return _Answers(replace(self._config, max_cached_tokens=_GROUP_TOKENS), self._clock)

    def remember(self, tenant: str, answers: Iterable[Sequence[int]]) -> None:
        """Take answers that were given to a tenant elsewhere, without an adapter. They are counted a piece at a time."""
        known = self._of(tenant, "")
        for answer in answers:
            known.add(answer)
        known.memory.work(_PIECE)

    def forget(self, tenant: str) -> None:
        for whose in [whose for whose in self._answers if whose[0] == tenant]:
            del self._answers[whose]
        for key in [key for key in self._groups if key[0] == tenant]:
            del self._groups[key]

    def _of(self, tenant: str | None, adapter: str) -> _Answers:
        """A tenant's answers with an adapter; nobody's are kept for nobody."""
        if tenant is None:
            return _Answers(self._config, self._clock)
        answers = self._answers.setdefault((tenant, adapter), _Answers(self._config, self._clock))
        self._answers.move_to_end((tenant, adapter))
        if len(self._answers) > self._config.max_tenants:
            self._answers.popitem(last=False)
        return answers


class Entered(NamedTuple):
    """Addresses of both automata, what counts the changes of the shared one's texts, where the text ends in these, and how
    many tokens may come.
    """

    own: int
    shared: int
    changes: ctypes.c_int64
    shared_end: Ending
    room: int


class SuffixSession:
    """One request's own text, and its tenant's answers.

    The text ends with 1 2. That was followed by 3 twice and by 4 once. Each candidate is named by whose text it is from, and
    by the least length of the suffix, count and share of its kind: 3 followed two tokens, at least twice, in at least 0.4 of
    all cases.

    >>> text = (1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2)
    >>> message = OpenSession(
    ...     session_id="s", tokens=text, prompt_length=len(text), sources=("suffix",), max_nodes=4, tenant="t"
    ... )
    >>> source = Suffix(SuffixConfig(max_cached_tokens=1000))
    >>> session = source.open(message)
    >>> list(session.candidates(session.start()))
    [(3, 'own:2:2:0.4'), (4, 'own:2:1:0.2')]

    One token further, the suffix 1 2 3 has always been followed by 1:

    >>> list(session.candidates(session.follow(session.start(), 3)))
    [(1, 'own:3:2:0.95')]

    What the request has answered is known to its tenant's next request, even if that begins with another text:

    >>> session.observe(StepReport(
    ...     session_id="s", committed=(7, 8, 9), length=14, prefix_hash=0, accepted_path=(), max_nodes=4
    ... ))
    >>> session.close()
    >>> later = source.open(OpenSession(
    ...     session_id="s", tokens=(6, 7), prompt_length=2, sources=("suffix",), max_nodes=4, tenant="t"
    ... ))
    >>> list(later.candidates(later.start()))
    [(8, 'shared:1:1:0.95')]

    Answers that are written side by side draft from each other, also where no tenant's answers are kept:

    >>> one, other = (
    ...     source.open(OpenSession(
    ...         session_id=name, tokens=(4, 5), prompt_length=2, sources=("suffix",), max_nodes=4, group="n"
    ...     ))
    ...     for name in ("s.0", "s.1")
    ... )
    >>> one.observe(StepReport(
    ...     session_id="s.0", committed=tuple(range(30, 46)), length=18, prefix_hash=0, accepted_path=(), max_nodes=4
    ... ))
    >>> list(other.candidates(other.start()))
    [(30, 'shared:2:1:0.95')]
    """

    def __init__(self, config: SuffixConfig, answers: _Answers, message: OpenSession) -> None:
        self.config = config
        self._answers = answers
        # Whether other answers to the prompt are written beside this one.
        self._beside = bool(message.group)
        self._own = Memory(config.depth, _MOST_FOLLOWERS)
        self._recent: deque[int] = deque(maxlen=config.depth)
        # What of the tenant's answers was counted when the text's end was looked up in them, the place of that end, and the
        # tokens since.
        self._shared: tuple[tuple[Automaton | CompiledAutomaton | None, int], Ending] = (None, 0), NOWHERE
        self._unfollowed: list[int] = []
        # What of the answer is not in ``_answers`` yet; and the tokens before that, without which n-grams would be missing.
        self._answer = array("i", message.tokens[message.prompt_length :])
        self._told = message.tokens[max(0, message.prompt_length - config.depth + 1) : message.prompt_length]
        self._read(message.tokens)

    @property
    def automata(self) -> tuple[Automaton | CompiledAutomaton, Automaton | CompiledAutomaton]:
        """What is counted of the request's own text, and of its tenant's answers. ``observe`` may replace them."""
        return self._own.automaton, self._answers.memory.automaton

    def start(self) -> Place:
        own = self._own.automaton
        return own.head if self._own.complete else own.find(self._recent), self._shared_end()

    def _shared_end(self) -> Ending:
        """The longest suffix of the text that occurs in the tenant's answers."""
        shared = self._answers.memory.automaton
        counted, found = self._shared
        if counted != (shared, shared.changes):
            found = shared.find(self._recent)
        elif shared.changes:
            found = shared.find(self._unfollowed, found)
        self._shared = (shared, shared.changes), found
        self._unfollowed.clear()
        return found

    def follow(self, place: Place, token: int) -> Place | None:
        own = self._own.automaton.follow(place[0], token)
        shared = self._answers.memory.automaton.follow(place[1], token)
        return None if own == shared == NOWHERE else (own, shared)

    def candidates(self, place: Place) -> Iterator[tuple[int, str]]:
        own, shared = self.automata
        if isinstance(own, CompiledAutomaton) and isinstance(shared, CompiledAutomaton):
            named = own.candidates(shared, place, self.config.depth, self.config.max_endings)
            return iter([(token, _NAMES[kind]) for token, kind in named])
        return self._candidates(place)

    def _candidates(self, place: Place) -> Iterator[tuple[int, str]]:
        """The reference of the compiled form."""
        memories = self.automata
        states = [state for state, _ in place]
        followers: list[list[tuple[int, int, int]] | None] = [None, None]
        seen: set[int] = set()
        found, enough = 0, self.config.max_endings
        # The longest n-grams have no counted follower.
        for length in range(min(max(place[0][1], place[1][1]), self.config.depth - 1), 0, -1):
            for whose in (0, 1):
                if length > place[whose][1]:
                    continue
                automaton, state = memories[whose], states[whose]
                # Suffixes of one state have the same followers.
                if followers[whose] is None or automaton.shorter(state) >= length:
                    states[whose] = state = automaton.shortened(state, length)
                    followers[whose] = known = automaton.followers(state)
                    for token, count, total in known:
                        if token not in seen:
                            seen.add(token)
                            share = bisect_right(_SHARES, count / total) - 1
                            size = bisect_right(_LENGTHS, length) - 1
                            yield token, _KINDS[whose][size][bisect_right(_COUNTS, count) - 1][share]
                found += bool(followers[whose])
            if found >= enough:
                return

    def enter(self) -> Entered | None:
        """What compiled code needs to count in the own text and to follow in the answers, without Python, until ``settle``.

        None: there is something else to do as well.
        """
        own, answers = self._own, self._answers.memory
        if not (own.idle and answers.idle):
            return None
        shared = answers.automaton
        (known, changes), end = self._shared
        if shared is not known or shared.changes != changes or self._unfollowed:
            end = self._shared_end()
        room = min(self.config.max_tokens - own.end, _TOLD - 1 - len(self._answer) if self._beside else _PIECE)
        if room <= 0:
            return None
        addresses = own.automaton.address, shared.address  # type: ignore[union-attr]  # Both are compiled.
        return Entered(*addresses, answers.changes, end, room)

    def settle(self, tokens: array[int], end: Ending, shared_end: Ending) -> None:
        """Note that compiled code has counted and followed tokens, behind which the text ends here."""
        self._own.counted(tokens, end)
        self._recent.extend(tokens)
        self._answer.extend(tokens)
        self._shared = self._shared[0], shared_end

    def observe(self, report: StepReport) -> None:
        self._read(report.committed)
        self._answer.extend(report.committed)
        if self._beside and len(self._answer) >= _TOLD:
            self._tell()

    def close(self) -> None:
        """Remember the answer for those beside it, and for the tenant's next requests, if that is configured."""
        if self._answer and (self._beside or self.config.max_cached_tokens):
            self._tell()

    def _tell(self) -> None:
        before = self._told if self._beside else ()
        self._answers.add((*before, *self._answer))
        self._answers.memory.work(_PIECE)
        self._told = (*before, *self._answer)[1 - self.config.depth :]
        self._answer = array("i")

    def catch_up(self) -> bool:
        """Count another piece of the texts."""
        self._answers.memory.work(self._own.work(_PIECE))
        return not (self._own.idle and self._answers.memory.idle)

    def _read(self, tokens: Sequence[int]) -> None:
        own, most = self._own, self.config.max_tokens
        if own.end + len(tokens) <= most:
            left = own.read(tokens, _PIECE)
        else:
            own.add(tokens[-most:])
            own.forget(own.end - most)
            left = own.work(_PIECE)
        self._recent.extend(tokens[-self.config.depth :])
        self._unfollowed += tokens
        if not self._answers.memory.idle:
            self._answers.memory.work(left)
