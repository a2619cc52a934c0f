"""Verifies the trees of a pass: turns the target's outcomes into verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.native.tree_walks import walk_all
from services.verifier.model.target_port import NOT_CHOSEN, Outcome, Tried
from speculation import rejection
from speculation.errors import Internal
from speculation.records import maker
from speculation.tree import ROOT
from speculation.types import Features, FinishReason, Observation, TokenLogprobs, TokenTree, Verdict

_make_verdict, _make_observation = maker(Verdict), maker(Observation)


def verify_all(given: Sequence[tuple[LiveRequest, TokenTree, Outcome]]) -> list[Verdict | Exception]:
    """Decide which tokens each request of a pass commits.

    Args:
        given: with each request its tree, and the target's results after the pending token (row 0) and after each node.

    Returns:
        For each request its verdict, or why there is none: the target's own error, if it chose nothing after a row that its
        choices lead to.
    """
    walked = [each for each in given if each[2].distribution is None]
    decided = iter(
        walk_all(
            [tree for _, tree, _ in walked],
            [outcome.choices for _, _, outcome in walked],
            [request.left for request, _, _ in walked],
            [request.stops for request, _, _ in walked],
        )
    )
    return [_verdict(*each, *next(decided)) if each[2].distribution is None else _by_rejection(*each) for each in given]


def _verdict(
    request: LiveRequest,
    tree: TokenTree,
    outcome: Outcome,
    path: tuple[int, ...],
    tokens: tuple[int, ...],
    finish_reason: FinishReason | None,
) -> Verdict | Exception:
    if not tokens:
        return outcome.error or Internal("the target chose nothing after a row that its choices lead to")
    try:
        return _make_verdict(
            accepted_path=path,
            committed=tokens,
            length=len(request.tokens) + len(tokens),
            finish_reason=finish_reason,
            logprobs=_logprobs(path, tokens, outcome) if outcome.logprobs is not None else (),
            observation=_observe(tree, outcome) if outcome.top_ids else None,
        )
    except Exception as error:
        return error


def with_features(verdict: Verdict, features: Features) -> Verdict:
    """``verdict`` with the hidden states that its tokens were chosen from."""
    return replace(verdict, observation=replace(verdict.observation or Observation(), features=features))


class KnownTrial(rejection.DraftTrial):
    """A trial of which some is known already, found where the logits are."""

    def __init__(self, known: Tried | None, *given: Any) -> None:
        super().__init__(*given)
        self._known = known

    def accepts(self, ordinal: int) -> bool:
        coin = None if self._known is None else self._known.coins[ordinal]
        return super().accepts(ordinal) if coin is None else coin

    def draw(self) -> int:
        token = NOT_CHOSEN if self._known is None else self._known.drawn
        return super().draw() if token == NOT_CHOSEN else token


def _by_rejection(request: LiveRequest, tree: TokenTree, outcome: Outcome) -> Verdict | Exception:
    distribution = outcome.distribution
    assert distribution is not None
    randomness = rejection.SeededRandomness(request.message.sampling.seed)

    def trial_at(node: int, siblings: list[int], position: int) -> rejection.DraftTrial:
        known = outcome.tried[node + 1] if outcome.tried else None
        return KnownTrial(known, tree, siblings, partial(distribution, node + 1), randomness, position)

    try:
        found = rejection.accept(tree, trial_at, len(request.tokens), request.stop_rule)
    except Exception as error:
        return error
    return _verdict(request, tree, outcome, found.path, found.tokens, found.finish_reason)


def _logprobs(path: tuple[int, ...], tokens: tuple[int, ...], outcome: Outcome) -> tuple[TokenLogprobs, ...]:
    assert outcome.logprobs is not None
    nodes = (ROOT, *path)
    return tuple(outcome.logprobs(node + 1, token) for node, token in zip(nodes, tokens, strict=False))


def _observe(tree: TokenTree, outcome: Outcome) -> Observation:
    ids = outcome.top_ids
    return _make_observation(tree=tree, top_ids=ids, probe_ids=tuple([ids[node + 1] for node in tree.probes]))
