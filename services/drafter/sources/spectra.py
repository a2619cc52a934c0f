"""SPECTRA (Le et al., ACL 2025): the model's own n-grams, looked up forward and backward, with retrieval beside them.

CORE keeps two dictionaries, fed by the prompt, the answer and the window's columns. ``forward`` maps a token to the
continuations seen after it; ``backward`` maps up to N-1 tokens to the token that came next. Every n-gram is entered with
its sub-n-grams. One guess of dynamic length is chained by backward look-ups until none hits (Algorithm 1 as printed lacks
that end). It comes first: in the printed order, a full forward list would always cut it off. The window explores: with
probability ``explore_prob`` a column takes the likeliest token that ``forward`` does not know yet (as printed, both
branches take the argmax).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from typing_extensions import override

from services.drafter.config import DrafterConfig, SpectraConfig
from services.drafter.sources.interfaces import TreeSource
from services.drafter.sources.lookahead import GrowingNgrams, Guess, Pool, guesses
from services.drafter.sources.retrieval import QUERIED, ending
from services.drafter.sources.window import Window
from speculation.messages import Continuation, OpenSession, RetrievalQuery, StepReport
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.types import TokenTree

CORE, FULL = "spectra_core", "spectra"
# Where guesses come from: n-grams of the text after a token, shorter ones, the window's, those chained backward, the corpus.
FORWARD, SUB_NGRAM, WINDOW, BACKWARD, RETRIEVED = LABELS = ("forward", "sub_ngram", "window", "backward", "retrieved")


def make_core(config: DrafterConfig) -> Spectra:
    """For ``catalogue.MAKERS``."""
    return Spectra(config.spectra, name=CORE)


def make_full(config: DrafterConfig) -> Spectra:
    """For ``catalogue.MAKERS``."""
    return Spectra(config.spectra, name=FULL)


class Spectra(TreeSource):
    """SPECTRA-CORE (Algorithm 1), or full SPECTRA, which adds the hits of SPECTRA-RETRIEVAL from a refined corpus."""

    def __init__(self, config: SpectraConfig, *, name: str) -> None:
        self._config = config
        self._name = name

    def open(self, message: OpenSession) -> SpectraSession:
        kind = RetrievingSpectraSession if self._name == FULL else SpectraSession
        return kind(self._config, self._name, message)


class SpectraSession:
    """Dictionaries and window of one request."""

    def __init__(self, config: SpectraConfig, name: str, message: OpenSession) -> None:
        self._config = config
        self._name = name
        self._forward = Pool(config.guesses)
        self._backward: dict[tuple[int, ...], int] = {}
        # Any seed will do; with this one, the same text gets the same drafts.
        seed = extend_hash(EMPTY_HASH, message.tokens)
        self._window = Window(ngram=config.ngram, width=config.window, tokens=message.tokens, seed=seed)
        self._random = random.Random(seed)
        self._text = GrowingNgrams(config.ngram)
        self._read(message.tokens)

    def draft(self, max_nodes: int) -> TokenTree:
        """Guesses first, then as many columns of the window as fit."""
        found = self._guesses()
        if not self._config.label_guesses:
            found = [(tokens, self._name) for tokens, _ in found]
        tree = guesses(found, max_nodes)
        return self._window.attach(tree, self._name, max_nodes - len(tree))

    def observe(self, report: StepReport) -> None:
        for ngram in self._window.advance(report, self._choose):
            self._enter(ngram, WINDOW)
        self._read(report.committed)

    def close(self) -> None:
        """Nothing outlives the request."""

    def _guesses(self) -> list[Guess]:
        found: list[Guess] = []
        if self._config.backward and (chained := self._chain()):
            found.append((chained, BACKWARD))
        if self._config.forward:
            found += self._forward.after(self._text.tail[-1])
        return found[: self._config.guesses]

    def _chain(self) -> tuple[int, ...]:
        """The guess of dynamic length."""
        most = self._config.ngram - 1
        text = list(self._text.tail)
        for _ in range(most):
            for length in range(min(most, len(text)), 0, -1):
                follower = self._backward.get(tuple(text[-length:]))
                if follower is not None:
                    text.append(follower)
                    break
            else:
                break
        return tuple(text[len(self._text.tail) :])

    def _enter(self, ngram: Sequence[int], seen: str) -> None:
        last = len(ngram) - 1
        for start in range(last if self._config.sub_ngrams else 1):
            self._forward.add(ngram[start], tuple(ngram[start + 1 :]), SUB_NGRAM if start else seen)
        for end in range(0 if self._config.sub_ngrams else last - 1, last):
            self._backward[tuple(ngram[: end + 1])] = ngram[end + 1]

    def _read(self, tokens: Sequence[int]) -> None:
        for ngram in self._text.read(tokens):
            self._enter(ngram, FORWARD)

    def _choose(self, likely: Sequence[int]) -> int:
        if self._random.random() < self._config.explore_prob:
            return next((token for token in likely if token not in self._forward), likely[0])
        return likely[0]


class RetrievingSpectraSession(SpectraSession):
    """Full SPECTRA. Implements ``LookingUp``."""

    def __init__(self, config: SpectraConfig, name: str, message: OpenSession) -> None:
        self._hits: list[Guess] = []
        self._recent = deque(message.tokens, maxlen=QUERIED)
        super().__init__(config, name, message)

    def query(self) -> RetrievalQuery:
        return ending(self._recent)

    def found(self, hits: Sequence[Continuation]) -> None:
        self._hits = [(hit.tokens, RETRIEVED) for hit in hits]

    @override
    def observe(self, report: StepReport) -> None:
        self._recent.extend(report.committed)
        super().observe(report)

    @override
    def _guesses(self) -> list[Guess]:
        # Guesses from the corpus take the places that the dictionaries leave free, but at least one.
        own, most = super()._guesses(), self._config.guesses
        return [*own[: most - 1], *self._hits, *own[most - 1 :]][:most] if self._hits else own
