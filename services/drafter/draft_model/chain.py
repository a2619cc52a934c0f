"""A draft while it grows: a chain of the likeliest tokens, with their likeliest siblings beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.drafter.draft_model.next_tokens import NextTokens
from services.drafter.draft_model.session import LmSession, MadeDraft
from services.drafter.draft_model.text_cache import NewRows
from services.drafter.sessions.drawn_proposals import Draw
from services.drafter.stopping.interface import TOP, DraftedToken
from speculation.tree import ROOT, prune
from speculation.types import Proposal, TokenTree

# Siblings cost no pass: they are other candidates of rows that the chain needs anyway.
_SIBLINGS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftLimits:
    """How far a draft may grow.

    Attributes:
        nodes: most nodes.
        length: most tokens of the chain.
        branches: nodes of each level that are run, and candidates taken after each; None: the chain alone is run, and its
            siblings are taken where they are likelier than its end. 1: the chain alone.
        least: nodes less likely than this are not drafted.
    """

    nodes: int
    length: int
    branches: int | None
    least: float


class DraftedChain:
    """Grows by one level with each pass of the model.

    A sampled draft is the bare chain, as long as ``limits.length`` says: neither the policy's ``more`` nor its tokens'
    probabilities may end it. A verifier drops sampled drafts that are late or longer than it has room for; if their length
    depended on their tokens, those that remain would no longer come from q.

    Args:
        source: name of the source.
        assumed: tokens behind the text that the draft follows; a policy does not end it.
        root: row of the last of them; None: the text's last row.
    """

    def __init__(
        self,
        session: LmSession,
        limits: DraftLimits,
        source: str,
        draw: Draw,
        *,
        assumed: Sequence[int] = (),
        root: int | None = None,
    ) -> None:
        self._session = session
        self._limits = limits
        self._source = source
        self._draw = draw
        self._assumed = len(assumed)
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._proposals: list[Proposal] = []
        self._chain: list[int] = []
        # Nodes whose rows are computed in the pass under way; of each that was, its row.
        self._run = [ROOT]
        self._rows = {ROOT: session.cache.text - 1 if root is None else root}

    def take(self, logits: torch.Tensor) -> NewRows | None:
        """Take [rows, kept ids] logits of the rows of the last pass; returns the rows of the next one, None: it is done."""
        return self._session.cache.add_drafts(*self.next(len(self._session.cache))) if self.goes_on(logits) else None

    def goes_on(self, logits: torch.Tensor) -> bool:
        """Take [rows, kept ids] logits of the rows of the last pass; returns whether another pass follows."""
        more = self._add_drawn(logits) if self._session.sampled else self._extend(logits)
        return more and len(self._chain) < self._limits.length

    def next(self, first: int) -> tuple[list[int], list[int]]:
        """The next pass's rows, from ``first`` on: the draft model's ids, and the rows of their parents."""
        parents = [self._rows[self._parents[node]] for node in self._run]
        self._rows |= {node: first + index for index, node in enumerate(self._run)}
        return [self._session.vocabulary.encode([self._tokens[node]])[0] for node in self._run], parents

    def made(self) -> MadeDraft:
        """The draft as far as it has grown."""
        tree = TokenTree(
            tokens=tuple(self._tokens),
            parents=tuple(self._parents),
            sources=(self._source,) * len(self._tokens),
            scores=tuple(self._scores),
            proposals=tuple(self._proposals),
        )
        return MadeDraft(
            tree=tree if self._proposals else prune(tree, self._limits.nodes, self._limits.nodes),
            chain=[self._tokens[node] for node in self._chain],
        )

    def _extend(self, logits: torch.Tensor) -> bool:
        found: dict[int, NextTokens] = {}
        level: list[int] = []
        for node, row in zip(self._run, logits.numpy(), strict=True):
            found[node] = self._session.distribution.likeliest(row, self._position)
            level += self._add(node, found[node])
        end = self._chain[-1] if self._chain else ROOT
        # Children are entered likeliest first.
        chosen = next((node for node in level if self._parents[node] == end), None)
        if chosen is None:
            return False
        self._chain.append(chosen)
        others = sorted((node for node in level if node != chosen), key=lambda node: -self._scores[node])
        self._run = [chosen, *others[: (self._limits.branches or 1) - 1]]
        return bool(self._assumed) or self._session.stop.more(self._token(chosen, found[end]))

    def _add(self, parent: int, after: NextTokens) -> list[int]:
        above = 1.0 if parent == ROOT else self._scores[parent]
        added = []
        for token, probability in zip(after.ids[: self._children], after.probabilities, strict=False):
            score = above * float(probability)
            if score < self._limits.least:
                break
            added.append(len(self._tokens))
            self._enter(int(token), parent, score)
        return added

    @property
    def _position(self) -> int:
        """That of the next level's tokens, counted from the start of the prompt."""
        return len(self._session.tokens) + self._assumed + len(self._chain)

    @property
    def _children(self) -> int:
        return min(self._limits.nodes, _SIBLINGS if self._limits.branches is None else self._limits.branches)

    def _add_drawn(self, logits: torch.Tensor) -> bool:
        token, probability, proposal = self._session.distribution.drawn(logits[0].numpy(), self._draw)
        parent = self._chain[-1] if self._chain else ROOT
        self._chain.append(len(self._tokens))
        self._enter(token, parent, probability * (1.0 if parent == ROOT else self._scores[parent]))
        self._proposals.append(proposal)
        self._run = [self._chain[-1]]
        return True

    def _enter(self, token: int, parent: int, score: float) -> None:
        self._tokens.append(token)
        self._parents.append(parent)
        self._scores.append(score)

    def _token(self, node: int, after: NextTokens) -> DraftedToken:
        step = len(self._chain) - 1
        above = self._scores[self._parents[node]] if self._parents[node] != ROOT else 1.0
        top: Sequence[float] = after.probabilities[:TOP].tolist()
        return DraftedToken(
            token=self._tokens[node],
            step=step,
            position=len(self._session.tokens) - self._session.prompt_length + step,
            probability=self._scores[node] / above if above > 0 else 0.0,
            path_probability=self._scores[node],
            top=top,
            entropy=after.entropy,
        )
