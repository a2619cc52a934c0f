"""What early-exit pruning would drop from a pass, and what that would cost (Bhendawade et al., 2402.11131, section 3.2.3).

Real passes of the target give the states below the layer where streams enter, of every node; the early exit turns them into
the probabilities of the tree's edges. Edges below a threshold are dropped with what hangs on them. Work is counted as the
paper has it: every node that is left carries all streams through the last layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lab.known_texts import KnownText, tree_states
from services.drafter.heads.streams.streams import Streams
from services.drafter.sessions.replay import ReplayedPass
from services.verifier.model.target import TransformersTarget
from speculation.tree import ROOT, follow
from speculation.types import TokenTree


@dataclass(frozen=True, slots=True)
class EdgesOfStep:
    """The early exit's probability of each node's edge, given its parent, and the nodes that the target accepts."""

    tree: TokenTree
    chances: tuple[float, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrunedAt:
    """What a threshold does, over the same steps.

    Attributes:
        dropped: share of all nodes.
        tau: tokens per pass that are left.
        lost_drafts: share of the steps whose last accepted row is dropped, so that its streams are missing.
        work: of a pass, rows times layers, over that without pruning; the early exit's output layer is left out.
    """

    below: float
    dropped: float
    tau: float
    lost_drafts: float
    work: float


def edges_of(
    target: TransformersTarget, texts: Sequence[KnownText], steps: Sequence[ReplayedPass], streams: Streams
) -> list[EdgesOfStep]:
    """The edges of all steps' trees, in their order.

    Args:
        streams: with an early exit.
    """
    found = []
    output = streams.output.vocabulary
    place = {token: number for number, token in enumerate(output.ids.tolist())}
    for number, text in enumerate(texts):
        own = [step for step in steps if step.text == number]
        for step, states in zip(own, tree_states(target, text, own, streams.config.state_layer), strict=True):
            with torch.inference_mode():
                early = streams.early(states)
                assert early is not None
                likely = streams.logits(early, output).float().softmax(-1)
            tree = step.tree
            # Streams draft from their own vocabulary alone.
            chances = [
                float(likely[parent + 1, place[token]]) if token in place else 1.0
                for parent, token in zip(tree.parents, tree.tokens, strict=True)
            ]
            found.append(EdgesOfStep(tree, tuple(chances), accepted_path(tree, text.tokens[step.length :], step.accepted)))
    return found


def accepted_path(tree: TokenTree, tokens: Sequence[int], count: int) -> tuple[int, ...]:
    """The nodes of the first ``count`` of ``tokens``, which lie on a path from the root."""
    path: list[int] = []
    for token in tokens[:count]:
        parent = path[-1] if path else ROOT
        path.append(next(n for n in range(len(tree)) if tree.parents[n] == parent and tree.tokens[n] == token))
    assert follow(tree, tokens) >= count
    return tuple(path)


def prune_at(below: float, steps: Sequence[EdgesOfStep], layers: int, upper: int, streams: int) -> PrunedAt:
    """What a threshold does.

    Args:
        layers: of the target.
        upper: of them, those that streams run through.
        streams: of a row.
    """
    nodes = left = tokens = lost = 0
    before = after = 0
    for step in steps:
        stays = [False] * len(step.tree)
        for node, parent in enumerate(step.tree.parents):
            stays[node] = step.chances[node] >= below and (parent == ROOT or stays[parent])
        kept = sum(stays)
        taken = sum(stays[node] for node in step.accepted)
        nodes, left, tokens = nodes + len(stays), left + kept, tokens + 1 + taken
        lost += taken < len(step.accepted)
        rows = 1 + len(stays)
        before += rows * (layers + streams * upper)
        after += rows * (layers - upper) + (1 + kept) * (1 + streams) * upper
    count = max(1, len(steps))
    return PrunedAt(
        below=below,
        dropped=1 - left / max(1, nodes),
        tau=tokens / count,
        lost_drafts=lost / count,
        work=after / max(1, before),
    )
