"""One request's part of a pass: the tree and its logits in, the verdict out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from services.verifier.engine.live_request import LiveRequest
from speculation import acceptance, rejection
from speculation.acceptance import Accepted
from speculation.choose import choose, log_probabilities
from speculation.tree import ROOT, path_to
from speculation.types import Features, Observation, TokenLogprobs, TokenTree, Verdict

# Of a column in ``likeliest``.
_DEPTH = 64


def verify(session: LiveRequest, tree: TokenTree, logits: torch.Tensor) -> Verdict:
    """Decide what ``session`` commits.

    Args:
        logits: [1 + nodes, vocabulary]: after the pending token, then after each node.
    """
    accepted = _accept(session, tree, logits)
    return Verdict(
        accepted_path=accepted.path,
        committed=accepted.tokens,
        length=len(session.tokens) + len(accepted.tokens),
        finish_reason=accepted.finish_reason,
        logprobs=_logprobs(session, accepted, logits),
        observation=_observe(session, tree, logits),
    )


def with_features(verdict: Verdict, features: Features) -> Verdict:
    """The verdict, with the hidden states from which its tokens were chosen."""
    return replace(verdict, observation=replace(verdict.observation or Observation(), features=features))


def _accept(session: LiveRequest, tree: TokenTree, logits: torch.Tensor) -> Accepted:
    params, length = session.request.sampling, len(session.tokens)

    def processed(node: int) -> tuple[torch.Tensor, int]:
        path = path_to(tree, node)
        row = logits[node + 1]
        if session.pipeline is not None:
            row = session.pipeline(row, session.tokens + [tree.tokens[i] for i in path])
        return row, length + len(path)

    def choose_at(node: int) -> int:
        row, position = processed(node)
        return choose(row, params, params.seed, position)

    def target_at(node: int) -> rejection.Distribution:
        row, _ = processed(node)
        if params.temperature == 0:
            p = np.zeros(len(row))
            p[choose(row, params, params.seed, length)] = 1.0
            return p
        return np.asarray(torch.softmax(row.double(), dim=-1).numpy())

    if session.request.plan.acceptance == "rejection":
        randomness = rejection.SeededRandomness(params.seed)
        return rejection.accept(tree, target_at, randomness, length, session.stop_rule)
    return acceptance.walk(tree, choose_at, session.stop_rule)


def likeliest(logits: torch.Tensor, k: int) -> torch.Tensor:
    """[rows, k], the ids of the ``k`` greatest of [rows, vocabulary], greatest first.

    They lie in the columns with the ``k`` greatest maxima, however the vocabulary is laid out in columns; so it need be read
    only once, for the maxima.
    """
    rows, vocabulary = logits.shape
    if vocabulary % _DEPTH or vocabulary // _DEPTH < k:
        return torch.topk(logits, k, dim=-1).indices
    columns = logits.view(rows, _DEPTH, -1)
    best = columns.amax(1).topk(k).indices
    found = columns.gather(2, best[:, None].expand(-1, _DEPTH, -1)).flatten(1).topk(k).indices
    return found // k * columns.shape[2] + best.gather(1, found % k)


def _logprobs(session: LiveRequest, accepted: Accepted, logits: torch.Tensor) -> tuple[TokenLogprobs, ...]:
    top = session.request.sampling.logprobs
    if top is None:
        return ()
    nodes = (ROOT, *accepted.path)
    return tuple(
        log_probabilities(logits[node + 1], token, top) for node, token in zip(nodes, accepted.tokens, strict=False)
    )


def _observe(session: LiveRequest, tree: TokenTree, logits: torch.Tensor) -> Observation | None:
    k = session.request.plan.observe_top_k
    if k == 0:
        return None
    top_ids = tuple(tuple(row) for row in likeliest(logits, k).tolist())
    return Observation(tree=tree, top_ids=top_ids, probe_ids=tuple(top_ids[node + 1] for node in tree.probes))
