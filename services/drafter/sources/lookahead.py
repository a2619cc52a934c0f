"""Lookahead decoding (Fu et al., 2024, arXiv 2402.02057): n-grams that the model produced in a window of guesses.

A pool maps a token to the n-grams that began with it, the latest first, at most ``guesses`` of them. It starts with the
prompt's n-grams. The original's sampling rule drew no bonus token after a full match; here the acceptance walk decides.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from services.drafter.config import DrafterConfig, LookaheadConfig
from services.drafter.sources.interfaces import TreeSource
from services.drafter.sources.window import Window
from speculation.messages import OpenSession, StepReport
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.tree import chain, merge, prune
from speculation.types import TokenTree

NAME = "lookahead"

# Claimed probability of the latest n-gram's next token, and the factor for each older or deeper one; they only rank nodes.
_FIRST, _OLDER = 0.5, 0.8


def make(config: DrafterConfig) -> Lookahead:
    """For ``catalogue.MAKERS``."""
    return Lookahead(config.lookahead)


# The tokens of a guess, and whose it is.
Guess = tuple[tuple[int, ...], str]


class Pool:
    """The latest continuations of every token, at most ``most`` for each, and where each was last seen."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._after: dict[int, OrderedDict[tuple[int, ...], str]] = {}

    def add(self, token: int, continuation: tuple[int, ...], seen: str) -> None:
        """Note that ``continuation`` followed ``token``."""
        known = self._after.setdefault(token, OrderedDict())
        known[continuation] = seen
        known.move_to_end(continuation)
        if len(known) > self._most:
            known.popitem(last=False)

    def after(self, token: int) -> list[Guess]:
        """The continuations of ``token``, the latest first."""
        known = self._after.get(token)
        return [] if known is None else list(reversed(known.items()))

    def __contains__(self, token: int) -> bool:
        return token in self._after


class Lookahead(TreeSource):
    """Lookahead decoding's two branches (section 3): the window finds n-grams, the pool drafts from them."""

    def __init__(self, config: LookaheadConfig) -> None:
        self._config = config

    def open(self, message: OpenSession) -> LookaheadSession:
        return LookaheadSession(self._config, message)


class LookaheadSession:
    """The window and the pool of one request."""

    def __init__(self, config: LookaheadConfig, message: OpenSession) -> None:
        self._pool = Pool(config.guesses)
        # Any seed will do; with this one, the same text gets the same drafts.
        seed = extend_hash(EMPTY_HASH, message.tokens)
        self._window = Window(ngram=config.ngram, width=config.window, tokens=message.tokens, seed=seed)
        self._text = GrowingNgrams(config.ngram)
        self._read(message.tokens)

    def draft(self, max_nodes: int) -> TokenTree:
        """Guesses first, then as many columns of the window as fit."""
        tree = guesses(self._pool.after(self._text.tail[-1]), max_nodes)
        return self._window.attach(tree, NAME, max_nodes - len(tree))

    def observe(self, report: StepReport) -> None:
        for ngram in self._window.advance(report, lambda likely: likely[0]):
            self._pool.add(ngram[0], ngram[1:], NAME)
        self._read(report.committed)

    def close(self) -> None:
        """Nothing outlives the request."""

    def _read(self, tokens: Sequence[int]) -> None:
        for ngram in self._text.read(tokens):
            self._pool.add(ngram[0], ngram[1:], NAME)


def guesses(found: Sequence[Guess], max_nodes: int) -> TokenTree:
    """A prefix tree of guesses, the likeliest first."""
    trees = []
    for rank, (tokens, source) in enumerate(found):
        first = _FIRST * _OLDER**rank
        trees.append(chain(tokens, source, [first * _OLDER**depth for depth in range(len(tokens))]))
    return prune(merge(trees), max_nodes, max_nodes)


class GrowingNgrams:
    """Yields every n-gram of ``length`` tokens once.

    Attributes:
        tail: the text's last tokens, at most ``length``.
    """

    def __init__(self, length: int) -> None:
        self.tail: deque[int] = deque(maxlen=length)

    def read(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """The n-grams that end in one of these tokens. The text so far goes before them."""
        for token in tokens:
            self.tail.append(token)
            if len(self.tail) == self.tail.maxlen:
                yield tuple(self.tail)
