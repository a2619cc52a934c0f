"""What is counted of texts: every stretch, whatever was added and forgotten, in whatever pieces; and what it costs."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

import pytest

from services.drafter.config import DrafterConfig, SuffixConfig
from services.drafter.merging.blend import BlendSession
from services.drafter.merging.calibrator import Calibrator
from services.drafter.native.automaton import CompiledAutomaton
from services.drafter.native.library import drafting_library
from services.drafter.service import DrafterService
from services.drafter.sources import suffix as suffixes
from services.drafter.sources import suffix_automaton as automata
from services.drafter.sources.suffix import Suffix, SuffixSession
from services.drafter.sources.suffix_automaton import BREAK, NOWHERE, Automaton
from services.drafter.sources.suffix_memory import Memory
from speculation.messages import Draft, OpenSession, StepReport
from speculation.prefix import EMPTY_HASH, extend_hash

Stretch = tuple[int, ...]
Make = Callable[[int], Automaton | CompiledAutomaton]


def compiled(depth: int) -> CompiledAutomaton:
    if (library := drafting_library()) is None:
        pytest.skip("there is no C compiler")
    return CompiledAutomaton(library, depth)


# Both forms of the automaton are held to the same search.
both_forms = pytest.mark.parametrize("make", [pytest.param(lambda depth: Automaton(depth, 4), id="reference"), compiled])


def split(tokens: Sequence[int]) -> list[list[int]]:
    """A stream of texts, one by one."""
    texts: list[list[int]] = [[]]
    for token in tokens:
        if token == BREAK:
            texts.append([])
        else:
            texts[-1].append(token)
    return texts


class Naive:
    """All stretches of some texts, spelled out: how often each occurred, and in what order it did first."""

    def __init__(self, texts: Sequence[Sequence[int]], depth: int) -> None:
        self.counts: Counter[Stretch] = Counter()
        self.followers: dict[Stretch, OrderedDict[int, int]] = {}
        for text in texts:
            for end in range(1, len(text) + 1):
                for start in range(max(0, end - depth), end):
                    stretch = tuple(text[start:end])
                    self.counts[stretch] += 1
                    after = self.followers.setdefault(stretch[:-1], OrderedDict())
                    after[stretch[-1]] = after.get(stretch[-1], 0) + 1

    def likeliest(self, stretch: Stretch, most: int) -> list[tuple[int, int, int]]:
        after = self.followers.get(stretch, OrderedDict())
        total = sum(after.values())
        return [(token, count, total) for token, count in sorted(after.items(), key=lambda each: -each[1])[:most]]


def check(counted: Automaton | CompiledAutomaton, naive: Naive, depth: int, *, ordered: bool = True) -> None:
    for stretch, count in naive.counts.items():
        state, size = counted.find(stretch)
        assert size == len(stretch)
        # The state's longest stretch is as frequent as this one, and goes on alike.
        assert counted.count(counted.shortened(state, size)) == count
        if len(stretch) < depth:
            found, expected = counted.followers(counted.shortened(state, size)), naive.likeliest(stretch, 4)
            if ordered:
                assert found == expected
            else:
                assert [each[1:] for each in found] == [each[1:] for each in expected]


def tokens_of(numbers: random.Random, size: int, kinds: int) -> list[int]:
    """Text that repeats itself, whole stretches of it."""
    text: list[int] = []
    while len(text) < size:
        if text and numbers.random() < 0.3:
            start = numbers.randrange(len(text))
            text += text[start : start + numbers.randint(1, 40)]
        else:
            text.append(numbers.randrange(kinds))
    return text[:size]


@pytest.mark.examples(5)
@pytest.mark.parametrize("depth", [1, 2, 5, 16])
@pytest.mark.parametrize("kinds", [1, 2, 7, 60])
@both_forms
def test_every_stretch_of_some_texts_is_counted(make: Make, depth: int, kinds: int) -> None:
    for seed in range(4):
        numbers = random.Random(seed)
        counted, texts = make(depth), []
        for _ in range(4):
            texts.append(tokens_of(numbers, numbers.randrange(120), kinds))
            counted.add([*texts[-1], BREAK])
            check(counted, Naive(texts, depth), depth)
        # What does not occur is not found, but its ending is.
        assert counted.find([10**6]) == NOWHERE
        assert counted.find([10**6, *texts[-1][-1:]])[1] == len(texts[-1][-1:])


@pytest.mark.examples(3)
@pytest.mark.parametrize("many", [0, 2, 16])
@both_forms
def test_many_followers_are_kept_in_order(make: Make, monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    monkeypatch.setattr(automata, "_MANY", many)
    numbers, depth = random.Random(many), 3
    counted, text = make(depth), list[int]()
    for _ in range(60):
        more = [token for _ in range(8) for token in (7, min(60, int(numbers.paretovariate(0.7))))]
        text += more
        counted.add(more)
        check(counted, Naive([text], depth), depth)
    removed = 300
    counted.remove(text[:removed])
    check(counted, after(text, removed, depth), depth, ordered=False)


def after(text: Sequence[int], begin: int, depth: int) -> Naive:
    """What is left of a text's stretches when those that end before ``begin`` are uncounted."""
    whole, gone = Naive([text], depth), Naive([text[:begin]], depth)
    left = Naive([], depth)
    left.counts = whole.counts - gone.counts
    for stretch, count in left.counts.items():
        left.followers.setdefault(stretch[:-1], OrderedDict())[stretch[-1]] = count
    return left


@pytest.mark.parametrize("depth", [1, 3, 8])
@both_forms
def test_texts_come_and_go_and_every_stretch_of_the_rest_is_counted(make: Make, depth: int) -> None:
    numbers, counted = random.Random(depth), make(depth)
    texts: list[list[int]] = []
    for _ in range(80):
        if texts and numbers.random() < 0.45:
            counted.remove([*texts.pop(0), BREAK])
        else:
            texts.append([numbers.randrange(3) for _ in range(numbers.randint(0, 12))])
            counted.add([*texts[-1], BREAK])
        naive = Naive(texts, depth)
        check(counted, naive, depth, ordered=False)
        assert sum(count for _, count, _ in counted.followers(0)) == sum(map(len, texts))
        for stretch in [tuple(numbers.randrange(3) for _ in range(5)) for _ in range(20)]:
            longest = next(size for size in range(min(5, depth), -1, -1) if not size or naive.counts[stretch[-size:]])
            assert counted.find(stretch)[1] == longest


@both_forms
def test_a_token_takes_two_states_at_most_and_none_where_the_text_repeats_itself(make: Make) -> None:
    numbers = random.Random(5)
    words = [[numbers.randrange(5000) for _ in range(numbers.randint(1, 6))] for _ in range(800)]
    text = [token for _ in range(4000) for token in numbers.choice(words)]
    for tokens in (text, [numbers.randrange(2) for _ in range(5000)], [1] * 5000):
        counted = make(16)
        counted.add(tokens)
        assert counted.states <= 2 * len(tokens)
        before = counted.states
        counted.add(tokens)
        assert counted.states <= before + 2 * 16
    # The work for one token does not grow with the text: a run ends like any other.
    counted = make(16)
    counted.add([1] * 100_000)
    assert counted.states <= 17


@pytest.mark.examples(4)
@pytest.mark.parametrize("seed", range(12))
def test_in_whatever_pieces_a_text_is_counted_and_forgotten(seed: int) -> None:
    numbers = random.Random(seed)
    depth, kinds = numbers.choice((1, 4, 16)), numbers.choice((2, 9, 100))
    memory, stream, begin = Memory(depth, 4), list[int](), 0
    for _ in range(120):
        if numbers.random() < 0.7:
            more = tokens_of(numbers, numbers.randrange(60), kinds)
            more = [BREAK if numbers.random() < 0.02 else token for token in more]
            memory.add(more)
            stream += more
        if numbers.random() < 0.4:
            begin = min(len(stream), begin + numbers.randrange(50))
            memory.forget(begin)
        before = memory.automaton.states
        piece = numbers.choice((0, 1, 7, 64))
        left = memory.work(piece)
        assert 0 <= left <= piece
        assert memory.automaton.states <= max(before, 2 * (piece + memory.end - memory.begin)) + 2 * piece
    while not memory.idle:
        memory.work(10)
    assert memory.end == len(stream)
    assert memory.begin == begin
    # Of stretches that reach back over the beginning it depends on when it was built anew.
    whole, kept = Naive(split(stream), depth).counts, Naive(split(stream[begin:]), depth).counts
    for stretch, count in kept.items():
        state, size = memory.automaton.find(stretch)
        assert size == len(stretch)
        assert count <= memory.automaton.count(memory.automaton.shortened(state, size)) <= whole[stretch]


def test_a_memory_that_forgets_for_ever_stays_small() -> None:
    numbers, memory, most = random.Random(1), Memory(16, 4), 500
    largest = 0
    for _ in range(400):
        memory.add(numbers.randrange(10**6) for _ in range(30))
        memory.forget(memory.end - most)
        memory.work(200)
        largest = max(largest, memory.automaton.states)
    assert largest <= 2 * (2 * most + 200)
    assert len(memory._text) <= 3 * most
    memory.forget(memory.end)
    assert memory.idle
    assert memory.automaton.states == 1
    assert not memory._text


# --- the source ----------------------------------------------------------------------------------------------------


class NaiveSession:
    """The source's rule, by a search through all texts."""

    def __init__(self, config: SuffixConfig, texts: list[list[int]], tokens: Sequence[int]) -> None:
        self.config, self.texts, self.text = config, list(texts), list(tokens)
        self.naive = Naive([self.text], config.depth), Naive(self.texts, config.depth)

    def start(self) -> Stretch:
        return ()

    def follow(self, place: Stretch, token: int) -> Stretch | None:
        return (*place, token) if any(token in text for text in (self.text, *self.texts)) else None

    def candidates(self, place: Stretch) -> list[tuple[int, str]]:
        config, path = self.config, (*self.text, *place)
        named: dict[int, str] = {}
        found = 0
        for length in range(min(config.depth - 1, len(path)), 0, -1):
            for whose, naive in zip(("own", "shared"), self.naive, strict=True):
                likeliest = naive.likeliest(path[-length:], 4)
                found += bool(likeliest)
                for token, count, total in likeliest:
                    lengths, counts, shares = suffixes._LENGTHS, suffixes._COUNTS, suffixes._SHARES
                    size = lengths[bisect_right(lengths, length) - 1]
                    often, share = counts[bisect_right(counts, count) - 1], shares[bisect_right(shares, count / total) - 1]
                    named.setdefault(token, f"{whose}:{size}:{often}:{share}")
            if found >= config.max_endings:
                break
        return list(named.items())

    def observe(self, report: StepReport) -> None:
        self.text += report.committed
        self.naive = Naive([self.text], self.config.depth), self.naive[1]

    def catch_up(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing is kept."""


def opened(source: Suffix, tokens: Sequence[int], prompt_length: int = 0) -> SuffixSession:
    return source.open(
        OpenSession(session_id="s", tokens=tuple(tokens), prompt_length=prompt_length, sources=(), max_nodes=8, tenant="t")
    )


def report(*committed: int) -> StepReport:
    return StepReport(session_id="s", committed=committed, length=0, prefix_hash=0, accepted_path=(), max_nodes=8)


@pytest.mark.parametrize("seed", range(10))
def test_drafts_are_those_of_a_search_through_the_texts(seed: int) -> None:
    numbers = random.Random(seed)
    depth, kinds = numbers.choice((2, 4, 16)), numbers.choice((2, 5, 30))
    config = SuffixConfig(depth=depth, max_cached_tokens=numbers.choice((0, 10_000)))
    source, answers = Suffix(config), list[list[int]]()
    for _ in range(3):
        prompt = tokens_of(numbers, numbers.randint(1, 50), kinds)
        session, naive = opened(source, prompt, len(prompt)), NaiveSession(config, answers, prompt)
        real, searched = (BlendSession({"x": each}, Calibrator(Suffix.prior)) for each in (session, naive))
        answer: list[int] = []
        for _ in range(6):
            assert list(session.candidates(session.start())) == naive.candidates(naive.start())
            assert real.draft(6) == searched.draft(6)
            committed = tokens_of(numbers, numbers.randint(1, 3), kinds)
            answer += committed
            for blend in (real, searched):
                blend.observe(report(*committed))
        real.close()
        if config.max_cached_tokens:
            answers.append(answer)


def test_a_long_prompt_is_counted_a_piece_at_a_time_and_found_at_last() -> None:
    numbers = random.Random(2)
    prompt = tokens_of(numbers, 20_000, 3000)
    source = Suffix(SuffixConfig(max_cached_tokens=50_000))
    session = opened(source, prompt)
    for _ in range(1000):
        before = session._own.automaton.states + session._answers.memory.automaton.states
        more = session.catch_up()
        after = session._own.automaton.states + session._answers.memory.automaton.states
        assert after - before <= 2 * suffixes._PIECE
        assert list(session.candidates(session.start())) is not None
        if not more:
            break
    assert session._own.complete
    early = opened(Suffix(SuffixConfig()), prompt[:10])
    for start in range(10, len(prompt), 100):
        early.observe(report(*prompt[start : start + 100]))
    assert [*early.candidates(early.start())] == [*session.candidates(session.start())] != []
    # An answer that is long is remembered in pieces, too.
    session.close()
    after_it = opened(source, prompt[:7])
    assert after_it._answers.memory.automaton.states <= 2 * 2 * suffixes._PIECE + 1
    while after_it.catch_up():
        pass
    assert after_it._answers.memory.complete


def test_of_a_text_that_is_too_long_the_latest_tokens_are_known() -> None:
    source = Suffix(SuffixConfig(max_tokens=100))
    first, filler, last = [1, 2, 3, 4], [*range(1000, 1200)], [5, 6, 7, 8]
    for whole in (True, False):
        session = opened(source, [*first, *filler, *last, 9] if whole else [0])
        for token in () if whole else (*first, *filler, *last, 9):
            session.observe(report(token))
        for known, beginning in ((False, first), (True, last)):
            session.observe(report(*beginning[:2]))
            found = [token for token, _ in session.candidates(session.start())]
            assert found[:1] == (beginning[2:3] if known else [])
        assert session._own.automaton.states <= 2 * 2 * 110


async def test_while_nobody_waits_the_drafter_counts_what_is_left_of_a_prompt() -> None:
    prompt = tuple(range(6 * suffixes._PIECE))
    ended = (*prompt, *prompt[-200:-190])
    service = DrafterService(DrafterConfig())
    message = OpenSession(session_id="s", tokens=ended, prompt_length=len(ended), sources=("suffix",), max_nodes=8)
    first = await service.open(message)
    assert isinstance(first, Draft)
    async for _ in service.further("s"):
        pass
    step = StepReport(
        session_id="s",
        committed=prompt[-190:-189],
        length=len(ended) + 1,
        prefix_hash=extend_hash(EMPTY_HASH, (*ended, prompt[-190])),
        accepted_path=(),
        max_nodes=8,
    )
    second = await service.step(step)
    assert isinstance(second, Draft)
    # What stands at the prompt's end was not counted when the first draft was due.
    assert len(first.tree) == 0
    assert second.tree.tokens == prompt[-189:-181]
    await service.stop()


@pytest.mark.parametrize("seed", range(10))
def test_the_place_in_a_tenants_answers_is_the_one_that_a_search_finds(seed: int) -> None:
    draw = random.Random(seed)
    source = Suffix(SuffixConfig(depth=draw.choice((3, 5, 16)), max_cached_tokens=200))
    others = [opened(source, [1, 2, 3]) for _ in range(4)]
    session = opened(source, [draw.randrange(3) for _ in range(20)])
    for _ in range(120):
        told = tuple(draw.randrange(3) for _ in range(draw.randrange(1, 4)))
        session.observe(report(*told))
        if others and draw.randrange(20) == 0:
            other = others.pop()
            answer = tuple(draw.randrange(3) for _ in range(120))
            other.observe(report(*answer))
            other.close()
        if draw.randrange(3):
            automaton = session._answers.memory.automaton
            assert session.start()[1] == automaton.find(session._recent)
