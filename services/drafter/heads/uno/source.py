"""Uno as a source of drafts (a diffusion adapter on the target's own weights, ifm-ai/uno).

The target's pass holds rows of noise behind a row of the text: random tokens at the positions that follow, each of which
sees the text and the noise before it. Their linear layers use the adapter; the rows of the text, and those of drafted
tokens, never do. What the target finds likely after a row of noise are marginals of the token at the position behind it.
For the drafter, rows of noise are probes (``TokenTree.probes``): computed, and never accepted. So nobody reads their keys
and values afterwards: what is committed next overwrites them.

As its authors have it, passes alternate. One holds the last token and the noise behind it, and yields the next token as
every pass does; the next one checks the tree of the marginals. With ``ends``, the pass that checks a tree has noise behind
the nodes where the accepted path is likely to end, too: if it ends there, the next pass checks a tree again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import cast

from services.drafter.config import DrafterConfig
from services.drafter.heads.uno.config import UnoConfig, parse_uno
from services.drafter.heads.uno.marginals import ClaimRates, Likely, likeliest_paths
from services.drafter.sources.interfaces import DraftWanted
from speculation.messages import OpenSession, StepReport
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.tree import ROOT, likely_ends
from speculation.types import EMPTY_TREE, Observation, TokenTree

NAME = "uno"
# Rows of noise, where no setting says how many: with the row of the last token, the authors' block of eight.
_ROWS = 7
# Paths less likely than this are never drafted.
_LEAST = 2e-4
# What a row is taken to claim of its likeliest token where nobody tells how likely it is, and of each further one.
_FIRST, _FURTHER = 0.6, 0.3


def make(config: DrafterConfig) -> UnoSource:
    """For ``catalogue.MAKERS``.

    Raises:
        ConfigurationError: no adapter is configured, or it cannot draft for the target; says why.
    """
    trained = config.trained
    folder, target = trained.weights_of(NAME)
    return UnoSource(
        parse_uno(folder, target), rows=trained.num_steps or _ROWS, width=trained.eagle_topk, ends=trained.uno_branches
    )


class UnoSource:
    """Implements ``ModelSource``. The model is the target, which computes its rows in its own passes.

    Args:
        rows: of noise, behind one row of the text.
        width: most likely tokens of a row that are used; None: all that the target reports.
        ends: most nodes of a draft that have noise behind them.

    Attributes:
        rates: what has been learnt of the marginals.
    """

    def __init__(self, config: UnoConfig, *, rows: int = _ROWS, width: int | None = None, ends: int = 0) -> None:
        self.config, self.rows, self.width, self.ends = config, rows, width, ends
        self.rates = ClaimRates()

    def open(self, message: OpenSession) -> UnoSession:
        return UnoSession(self, message)

    def draft(self, batch: Sequence[DraftWanted]) -> Sequence[TokenTree | None]:
        return [
            cast(UnoSession, wanted.session).draft(wanted.max_nodes, max(_LEAST, wanted.min_probability)) for wanted in batch
        ]

    def forget(self, tenant: str) -> None:
        """Nothing is kept beyond a session."""


class UnoSession:
    """One request: the marginals of the tokens to come, if the last pass showed any, and the noise of the last draft."""

    def __init__(self, source: UnoSource, message: OpenSession) -> None:
        self._source = source
        # The adapter is trained for the model itself.
        self._drafts = not message.adapter
        self._hash = extend_hash(EMPTY_HASH, message.tokens)
        self._noise: tuple[int, ...] = ()
        # Likely tokens at each position behind the text, and the row of noise that told the first of them.
        self._levels: list[list[Likely]] = []
        self._row = 0

    def draft(self, max_nodes: int, least: float) -> TokenTree:
        """The tree of the marginals; where there are none, noise."""
        if not self._drafts or not max_nodes:
            return EMPTY_TREE
        rows = min(self._source.rows, max_nodes)
        # Any seed will do; with this one, the same text has the same noise.
        drawn = random.Random(self._hash)
        self._noise = tuple(drawn.randrange(1, self._source.config.noise_below) for _ in range(rows))
        ends = min(self._source.ends, (max_nodes - 1) // rows)
        tokens, parents, scores = likeliest_paths(self._likely(), max_nodes - ends * rows, least)
        if not tokens:
            return self._with_noise([], [], [], {ROOT: 1.0})
        return self._with_noise(tokens, parents, scores, dict(likely_ends(parents, scores)[:ends]))

    def observe(self, report: StepReport) -> None:
        for level, (claimed, token) in enumerate(zip(self._levels, report.committed, strict=False)):
            self._source.rates.learn(self._row + level, claimed, token)
        self._hash = extend_hash(self._hash, report.committed)
        self._levels, self._row = [], 0
        if report.observation is not None and report.observation.probe_ids:
            self._read(report.observation, report.accepted_path)

    def close(self) -> None:
        """Nothing outlives the request."""

    def _likely(self) -> list[list[Likely]]:
        return [self._source.rates.of(self._row + level, claimed) for level, claimed in enumerate(self._levels)]

    def _with_noise(self, tokens: list[int], parents: list[int], scores: list[float], ends: dict[int, float]) -> TokenTree:
        """The tree with the noise behind each of ``ends``, which is as likely an end as it says.

        A probe's score is what it brings: the chance that a guess at its position and each before it will be accepted.
        """
        drafted = len(tokens)
        for end, chance in ends.items():
            parent = end
            for row, token in enumerate(self._noise):
                chance *= self._source.rates.worth(row)
                tokens.append(token)
                parents.append(parent)
                scores.append(chance)
                parent = len(tokens) - 1
        return TokenTree(
            tokens=tuple(tokens),
            parents=tuple(parents),
            sources=(NAME,) * len(tokens),
            scores=tuple(scores),
            probes=tuple(range(drafted, len(tokens))),
        )

    def _read(self, seen: Observation, path: Sequence[int]) -> None:
        """Take the marginals of the noise behind the accepted path's last node, or behind the last one that has noise."""
        chances = seen.probe_chances or ((),) * len(seen.probe_ids)
        probes = zip(seen.tree.probes, seen.probe_ids, chances, strict=False)
        told = {node: _claims(ids, own) for node, ids, own in probes}
        below = {(seen.tree.parents[node], seen.tree.tokens[node]): node for node in told}
        for passed, end in enumerate(reversed((ROOT, *path))):
            found: list[list[Likely]] = []
            node: int | None = end
            for token in self._noise:
                if node is None or (node := below.get((node, token))) is None:
                    break
                found.append(told[node][: self._source.width])
            # What the first rows guessed is committed already.
            if len(found) > passed:
                self._levels, self._row = found[passed:], passed
                return


def _claims(ids: Sequence[int], chances: Sequence[float]) -> list[Likely]:
    """What a row of noise says of its position, the likeliest token first."""
    told = chances if len(chances) == len(ids) else [_FIRST * _FURTHER**rank for rank in range(len(ids))]
    return [(token, min(1.0, max(0.0, chance))) for token, chance in zip(ids, told, strict=True)]
