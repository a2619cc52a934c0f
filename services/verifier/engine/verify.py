"""Verifies one request's tree: turns the target's outcome of a pass into a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from typing_extensions import override

from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.native.walks import walk_together
from services.verifier.engine.singles import nothing_chosen
from services.verifier.model.target_port import NOT_CHOSEN, Outcome, Tried
from speculation import acceptance, rejection
from speculation.acceptance import Accepted
from speculation.records import maker
from speculation.tree import ROOT
from speculation.types import EMPTY_TREE, Features, Observation, TokenLogprobs, TokenTree, Verdict

_make_verdict, _make_observation = maker(Verdict), maker(Observation)


def verify(request: LiveRequest, tree: TokenTree, outcome: Outcome) -> Verdict:
    """Decide which tokens ``request`` commits.

    Args:
        outcome: the target's results after the pending token (row 0) and after each node of ``tree``.

    Raises:
        Exception: the target's own error, if it chose nothing after a row on the accepted path.
    """
    if not tree.tokens and outcome.distribution is None and outcome.logprobs is None:
        return _plain(request, outcome)
    accepted = _accept(request, tree, outcome)
    return _make_verdict(
        accepted_path=accepted.path,
        committed=accepted.tokens,
        length=len(request.tokens) + len(accepted.tokens),
        finish_reason=accepted.finish_reason,
        logprobs=_logprobs(accepted, outcome) if outcome.logprobs is not None else (),
        observation=_observe(tree, outcome) if outcome.top_ids else None,
    )


def verify_together(
    requests: Sequence[LiveRequest], trees: Sequence[TokenTree], outcomes: Sequence[Outcome]
) -> list[Verdict | None]:
    """As ``verify`` of each tree, where that needs only its choices; None: it needs more, or the answer ends.

    Args:
        outcomes: what they have of distributions and log-probabilities is not looked at.
    """
    walked = walk_together(
        [len(tree.tokens) for tree in trees],
        chain.from_iterable([(NOT_CHOSEN, *tree.tokens) for tree in trees]),
        chain.from_iterable([tree.parents for tree in trees]),
        chain.from_iterable([outcome.choices for outcome in outcomes]),
    )
    if walked is None:
        return [None] * len(requests)
    return [
        verdict_of(path, tokens, len(request.tokens), tree, outcome.top_ids)
        if tokens[-1] != NOT_CHOSEN
        and request.stop_ids.isdisjoint(tokens)
        and len(request.tokens) + len(tokens) < request.full_at
        else None
        for request, tree, outcome, path, tokens in zip(requests, trees, outcomes, *walked, strict=True)
    ]


def verdict_of(
    path: tuple[int, ...], tokens: tuple[int, ...], before: int, tree: TokenTree, top_ids: Sequence[tuple[int, ...]]
) -> Verdict:
    """The verdict on a tree without probes down which the choices lead, behind ``before`` tokens; the answer goes on."""
    return _make_verdict(
        accepted_path=path,
        committed=tokens,
        length=before + len(tokens),
        observation=_make_observation(tree=tree, top_ids=top_ids) if top_ids else None,
    )


def _plain(request: LiveRequest, outcome: Outcome) -> Verdict:
    """What ``verify`` finds where there is no tree: one token, chosen after the pending one."""
    committed = outcome.choices
    token = committed[0]
    if token == NOT_CHOSEN:
        raise nothing_chosen(outcome)
    return _make_verdict(
        accepted_path=(),
        committed=committed,
        length=len(request.tokens) + 1,
        finish_reason=request.reason_to_end(token),
        observation=_observe(EMPTY_TREE, outcome) if outcome.top_ids else None,
    )


def with_features(verdict: Verdict, features: Features) -> Verdict:
    """``verdict`` with the hidden states that its tokens were chosen from."""
    return replace(verdict, observation=replace(verdict.observation or Observation(), features=features))


class KnownTrial(rejection.DraftTrial):
    """A trial of which some is known already, found where the logits are."""

    def __init__(self, known: Tried | None, *given: Any) -> None:
        super().__init__(*given)
        self._known = known

    @override
    def accepts(self, ordinal: int) -> bool:
        coin = None if self._known is None else self._known.coins[ordinal]
        return super().accepts(ordinal) if coin is None else coin

    @override
    def draw(self) -> int:
        token = NOT_CHOSEN if self._known is None else self._known.drawn
        return super().draw() if token == NOT_CHOSEN else token


def _accept(request: LiveRequest, tree: TokenTree, outcome: Outcome) -> Accepted:
    distribution = outcome.distribution
    if distribution is None:
        choices = outcome.choices
        accepted = acceptance.walk(tree, lambda node: choices[node + 1], request.stop_rule)
        # No node holds it, so a walk that meets it ends there.
        if accepted.tokens[-1] == NOT_CHOSEN:
            raise nothing_chosen(outcome)
        return accepted
    randomness = rejection.SeededRandomness(request.message.sampling.seed)

    def trial_at(node: int, siblings: list[int], position: int) -> rejection.DraftTrial:
        known = outcome.tried[node + 1] if outcome.tried else None
        return KnownTrial(known, tree, siblings, partial(distribution, node + 1), randomness, position)

    return rejection.accept(tree, trial_at, len(request.tokens), request.stop_rule)


def _logprobs(accepted: Accepted, outcome: Outcome) -> tuple[TokenLogprobs, ...]:
    nodes = (ROOT, *accepted.path)
    assert outcome.logprobs is not None
    return tuple(outcome.logprobs(node + 1, token) for node, token in zip(nodes, accepted.tokens, strict=False))


def _observe(tree: TokenTree, outcome: Outcome) -> Observation:
    ids = outcome.top_ids
    probe_ids = tuple(ids[node + 1] for node in tree.probes)
    if not outcome.chances:
        return _make_observation(tree=tree, top_ids=ids, probe_ids=probe_ids)
    chances = tuple(outcome.chances[node + 1] for node in tree.probes)
    return _make_observation(tree=tree, top_ids=ids, probe_ids=probe_ids, probe_chances=chances)
