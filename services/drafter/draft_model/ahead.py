"""Drafts for likely outcomes of steps that the target still computes (speculative speculative decoding, 2603.03251).

An outcome is a path of the last draft, and a token behind it that the draft does not hold. One pass over the draft's nodes
says how likely each is, by the draft model. Then the drafts of all sessions grow together, one level with each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from services.drafter.draft_model.chain import DraftedChain
from services.drafter.draft_model.language_model import LanguageModel
from services.drafter.draft_model.session import LmSession
from services.drafter.draft_model.text_cache import NewRows
from services.drafter.sessions.outcomes import likeliest_outcomes
from services.drafter.sources.interfaces import Ahead
from speculation.tree import ROOT, depths, prune
from speculation.types import TokenTree

# Likeliest nodes of a draft whose outcomes are looked for: the target rarely reaches the others.
MOST_NODES = 32

# Makes a draft behind the text and the tokens of an outcome; the row of its last token is given.
MakeChain = Callable[[Sequence[int], int], DraftedChain]


@dataclass(kw_only=True, slots=True)
class DraftedOutcomes:
    """The drafts made ahead for one session.

    Args:
        tree: the session's last draft, for its present text.
        text: the draft model's ids of the text's tokens that have no row, at least one.
        most: most outcomes.

    Attributes:
        rows: those of the coming pass; None: all is drafted.
    """

    session: LmSession
    tree: TokenTree
    text: Sequence[int]
    most: int
    make: MakeChain
    rows: NewRows | None = None
    _drafts: dict[tuple[int, ...], DraftedChain] = field(default_factory=dict)
    # Those that go on, each with its rows in the coming pass.
    _growing: list[tuple[DraftedChain, int]] = field(default_factory=list)

    def begin(self) -> None:
        """Enter the rows of the last draft."""
        self.tree = prune(self.tree, MOST_NODES, MOST_NODES)
        self.rows = self.session.cache.add_behind_text(self.text, self._ids(self.tree.tokens), self.tree.parents)

    def take(self, logits: torch.Tensor) -> None:
        """Take [rows, kept ids] logits of ``rows``, and enter the next ones."""
        self.rows = self._grow(logits) if self._drafts else self._choose(logits)

    def found(self) -> list[Ahead]:
        """The drafts as far as they have grown, the likeliest outcome's first; whole ones are kept for the next step."""
        made = {outcome: draft.made() for outcome, draft in self._drafts.items()}
        if self.rows is None:
            self.session.drafted_ahead(made)
        return [Ahead(assumed=outcome, tree=each.tree) for outcome, each in made.items() if each.tree]

    def _choose(self, logits: torch.Tensor) -> NewRows | None:
        """Choose the outcomes, and enter the rows of their last tokens."""
        session, tree, cache = self.session, self.tree, self.session.cache
        length = len(session.tokens)
        positions = [length, *(length + depth for depth in depths(tree))]
        after = [session.distribution.likeliest(row, at) for row, at in zip(logits.numpy(), positions, strict=True)]

        def likely(node: int) -> list[tuple[int, float]]:
            found = after[node + 1]
            return list(zip(found.ids.tolist(), found.probabilities.tolist(), strict=True))

        outcomes = likeliest_outcomes(tree, likely, self.most)
        if not outcomes:
            return None
        nodes = {(parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
        parents = []
        for *path, _ in outcomes:
            node = ROOT
            for token in path:
                node = nodes[node, token]
            parents.append(cache.text + node)
        first = len(cache)
        rows = cache.add_drafts(self._ids([outcome[-1] for outcome in outcomes]), parents)
        self._drafts = {outcome: self.make(outcome, first + index) for index, outcome in enumerate(outcomes)}
        self._growing = [(draft, 1) for draft in self._drafts.values()]
        return rows

    def _grow(self, logits: torch.Tensor) -> NewRows | None:
        cache, growing = self.session.cache, self._growing
        ids: list[int] = []
        parents: list[int] = []
        self._growing = []
        for (draft, _), own in zip(growing, torch.split(logits, [count for _, count in growing]), strict=True):
            if draft.goes_on(own):
                new, above = draft.next(len(cache) + len(ids))
                self._growing.append((draft, len(new)))
                ids += new
                parents += above
        return cache.add_drafts(ids, parents) if ids else None

    def _ids(self, tokens: Sequence[int]) -> list[int]:
        """The draft model's id of each of its own tokens."""
        return [self.session.vocabulary.encode([token])[0] for token in tokens]


def draft_outcomes(lm: LanguageModel, sessions: Sequence[DraftedOutcomes], go_on: Callable[[], bool]) -> None:
    """Draft for the outcomes of several sessions; ``go_on`` as in ``DraftsAhead.draft_ahead``."""
    for each in sessions:
        each.begin()
    while (running := [(each, each.rows) for each in sessions if each.rows is not None]) and go_on():
        for (each, _), logits in zip(running, lm.logits([rows for _, rows in running]), strict=True):
            each.take(logits)
    for each, rows in running:
        each.session.cache.withdraw(rows)
