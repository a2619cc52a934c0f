"""Token trees: validate, build, merge, prune, and the relations between nodes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence

from speculation import limits
from speculation.errors import MalformedTree
from speculation.types import TokenTree

ROOT = -1


def validate(tree: TokenTree, *, vocab_size: int, max_nodes: int, sources: Collection[str] | None = None) -> None:
    """Check a tree that came from outside.

    Args:
        sources: names that nodes may have, so that a drafter cannot make statistics per source grow; None: any.

    Raises:
        MalformedTree: names the field, the entry and the rule it breaks.
    """
    nodes = len(tree.tokens)
    if nodes > max_nodes:
        raise MalformedTree("tree.tokens", f"{nodes} nodes", f"at most {max_nodes} nodes")
    _validate_sizes(tree, nodes)
    for node, (token, parent, source) in enumerate(zip(tree.tokens, tree.parents, tree.sources, strict=True)):
        if not 0 <= token < vocab_size:
            raise MalformedTree(f"tree.tokens[{node}]", token, f"a token id below {vocab_size}")
        if not ROOT <= parent < node:
            raise MalformedTree(f"tree.parents[{node}]", parent, f"-1 or an earlier node than {node}")
        if sources is not None and source not in sources:
            raise MalformedTree(f"tree.sources[{node}]", source, f"one of {', '.join(sorted(sources))}")
    for node, score in enumerate(tree.scores):
        if score != score:
            raise MalformedTree(f"tree.scores[{node}]", score, "a number")
    if tree.probes:
        _validate_probes(tree)
    if tree.proposals:
        _validate_proposals(tree, vocab_size)


def _validate_sizes(tree: TokenTree, nodes: int) -> None:
    if len(tree.parents) == len(tree.sources) == len(tree.scores) == nodes and not tree.proposals:
        # As of nearly all.
        return
    for name in ("parents", "sources", "scores", "proposals"):
        length = len(getattr(tree, name))
        if length != nodes and not (length == 0 and name in ("scores", "proposals")):
            raise MalformedTree(f"tree.{name}", f"{length} entries", f"one entry for each of the {nodes} nodes")


def _validate_probes(tree: TokenTree) -> None:
    probes = set(tree.probes)
    if len(probes) != len(tree.probes) or not all(0 <= node < len(tree) for node in probes):
        raise MalformedTree("tree.probes", tree.probes, f"distinct nodes below {len(tree)}")
    for node, parent in enumerate(tree.parents):
        if parent in probes and node not in probes:
            raise MalformedTree(f"tree.parents[{node}]", parent, "no probe, unless the node is a probe itself")


def _validate_proposals(tree: TokenTree, vocab_size: int) -> None:
    for node, proposal in enumerate(tree.proposals):
        name = f"tree.proposals[{node}]"
        ids, q = proposal.token_ids, proposal.probabilities
        if len(ids) != len(q) or not 1 <= len(ids) <= limits.MAX_PROPOSAL or len(set(ids)) != len(ids):
            raise MalformedTree(name, f"{len(ids)} ids, {len(q)} probabilities", f"1 to {limits.MAX_PROPOSAL} of both")
        if not all(0 <= token < vocab_size for token in ids):
            raise MalformedTree(name, "an id outside the vocabulary", f"token ids below {vocab_size}")
        if not all(value >= 0 for value in q) or abs(sum(q) - 1) > 1e-3:
            raise MalformedTree(name, f"probabilities with sum {sum(q)}", "non-negative numbers with sum 1")
        if tree.tokens[node] not in ids or q[ids.index(tree.tokens[node])] == 0:
            raise MalformedTree(name, "without the node's own token", "a distribution that it can be drawn from")


def children(tree: TokenTree) -> dict[int, list[int]]:
    """Children of every node and of ``ROOT``, earlier siblings first. Probes are left out: they can never be accepted.

    After 7 comes 8, and after that 9 or 5:

    >>> fork = TokenTree(tokens=(7, 8, 9, 5), parents=(ROOT, 0, 1, 1), sources=("suffix",) * 4)
    >>> children(fork)
    {-1: [0], 0: [1], 1: [2, 3]}
    """
    probes = set(tree.probes)
    result: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        if node not in probes:
            result.setdefault(parent, []).append(node)
    return result


def depths(tree: TokenTree) -> list[int]:
    """Depth of each node; children of the root have depth 1."""
    result: list[int] = []
    for parent in tree.parents:
        result.append(1 if parent == ROOT else result[parent] + 1)
    return result


def path_to(tree: TokenTree, node: int) -> tuple[int, ...]:
    """Nodes from the root's child down to ``node``; empty for ``ROOT``.

    >>> fork = TokenTree(tokens=(7, 8, 9, 5), parents=(ROOT, 0, 1, 1), sources=("suffix",) * 4)
    >>> path_to(fork, 3)
    (0, 1, 3)
    """
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = tree.parents[node]
    return tuple(reversed(path))


def chain(tokens: Sequence[int], source: str, scores: Sequence[float] = ()) -> TokenTree:
    """A tree without branches.

    >>> chain([7, 8, 9], "suffix").parents
    (-1, 0, 1)
    """
    return TokenTree(
        tokens=tuple(tokens),
        parents=tuple(range(-1, len(tokens) - 1)),
        sources=(source,) * len(tokens),
        scores=tuple(scores),
    )


def claims(tree: TokenTree) -> list[float]:
    """For every node, the probability that its source claims for the whole path to it.

    A tree without scores claims 1/2 for every further token.
    """
    if tree.scores:
        return [min(1.0, max(0.0, score)) for score in tree.scores]
    found: list[float] = []
    for parent in tree.parents:
        found.append(0.5 if parent == ROOT else 0.5 * found[parent])
    return found


def merge(trees: Iterable[TokenTree], value: Callable[[TokenTree], Sequence[float]] | None = None) -> TokenTree:
    """One prefix tree of all paths. If several trees propose a node, the one that gives it the highest value wins.

    A probe is never merged with a node that can be accepted.

    Two sources agree on 7 and 8, and differ after that. What they share becomes one node, so the target checks four tokens
    and not six:

    >>> copied = chain([7, 8, 9], "prompt_lookup", [0.6, 0.3, 0.1])
    >>> counted = chain([7, 8, 5], "suffix", [0.5, 0.4, 0.2])
    >>> both = merge([copied, counted])
    >>> [tuple(both.tokens[step] for step in path_to(both, node)) for node in range(len(both))]
    [(7,), (7, 8), (7, 8, 9), (7, 8, 5)]
    >>> both.tokens, both.parents
    ((7, 8, 9, 5), (-1, 0, 1, 1))

    A shared node belongs to the source that claims more for it, and has the score that this source gives it:

    >>> list(zip(both.tokens, both.sources, both.scores))
    [(7, 'prompt_lookup', 0.6), (8, 'suffix', 0.4), (9, 'prompt_lookup', 0.1), (5, 'suffix', 0.2)]

    Args:
        value: gives the value of each node of a tree; None: its score.

    Raises:
        ValueError: a tree has proposals.
    """
    tokens: list[int] = []
    parents: list[int] = []
    sources: list[str] = []
    scores: list[float] = []
    values: list[float] = []
    probes: list[int] = []
    place: dict[tuple[int, int, bool], int] = {}
    for tree in trees:
        if tree.proposals:
            raise ValueError("trees with proposals cannot be merged")
        claimed = claims(tree) if value is not None else tree.scores or (0.0,) * len(tree)
        valued = claimed if value is None else value(tree)
        own_probes = set(tree.probes)
        mapped: list[int] = []
        for node, token in enumerate(tree.tokens):
            parent = ROOT if tree.parents[node] == ROOT else mapped[tree.parents[node]]
            at = place.setdefault((parent, token, node in own_probes), len(tokens))
            mapped.append(at)
            if at == len(tokens):
                tokens.append(token)
                parents.append(parent)
                sources.append(tree.sources[node])
                scores.append(claimed[node])
                values.append(valued[node])
                if node in own_probes:
                    probes.append(at)
            elif valued[node] > values[at]:
                scores[at], values[at], sources[at] = claimed[node], valued[node], tree.sources[node]
    return TokenTree(
        tokens=tuple(tokens), parents=tuple(parents), sources=tuple(sources), scores=tuple(scores), probes=tuple(probes)
    )


def fits(tree: TokenTree, max_nodes: int, max_depth: int) -> bool:
    """Whether ``prune`` leaves a tree as it is."""
    nodes = len(tree.tokens)
    return nodes <= max_nodes and (nodes <= max_depth or max(depths(tree), default=0) <= max_depth)


def prune(tree: TokenTree, max_nodes: int, max_depth: int, values: Sequence[float] = ()) -> TokenTree:
    """The ``max_nodes`` best nodes no deeper than ``max_depth``; a node is kept only with its parent.

    The node of the highest value is kept next among those whose parent is kept; of equals, the earliest. Values default to
    the scores, and those to 0.

    After 7 and 8 comes 9 or, more likely, 5:

    >>> fork = TokenTree(tokens=(7, 8, 9, 5), parents=(ROOT, 0, 1, 1), sources=("suffix",) * 4, scores=(0.6, 0.4, 0.1, 0.2))
    >>> prune(fork, max_nodes=3, max_depth=9).tokens
    (7, 8, 5)
    >>> prune(fork, max_nodes=3, max_depth=2).tokens
    (7, 8)

    Raises:
        ValueError: the tree holds sampled tokens (``proposals``). Dropping some after they were drawn would bias the
            rejection rule: which tokens remain would depend on what they are.
    """
    if fits(tree, max_nodes, max_depth):
        return tree
    if tree.proposals:
        raise ValueError("a sampled tree cannot be pruned")
    depth = depths(tree)
    scores = values or tree.scores or (0.0,) * len(tree)
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        below.setdefault(parent, []).append(node)
    kept: list[int] = []
    heap = [(-scores[node], node) for node in below.get(ROOT, ()) if max_depth >= 1]
    heapq.heapify(heap)
    while heap and len(kept) < max_nodes:
        _, node = heapq.heappop(heap)
        kept.append(node)
        if depth[node] < max_depth:
            for child in below.get(node, ()):
                heapq.heappush(heap, (-scores[child], child))
    return take(tree, sorted(kept))


def follow(tree: TokenTree, tokens: Sequence[int]) -> int:
    """How many of ``tokens``, from the first one on, lie on a path from the root; of equal siblings the first is followed.

    >>> follow(chain([7, 8, 9], "suffix"), [7, 8, 4])
    2
    """
    return _walked(tree, tokens)[0]


def follow_on(tree: TokenTree, tokens: Sequence[int]) -> tuple[int, bool]:
    """As ``follow``; and whether all are there and anything remains below: whether ``descend`` gives a tree with nodes.

    >>> follow_on(chain([7, 8], "suffix"), [7]), follow_on(chain([7], "suffix"), [7]), follow_on(chain([7], "suffix"), [5])
    ((1, True), (1, False), (0, False))
    """
    count, node = _walked(tree, tokens)
    if count < len(tokens) or not tree.probes:
        return count, count == len(tokens) and node in tree.parents
    return count, any(parent == node and child not in tree.probes for child, parent in enumerate(tree.parents))


def _walked(tree: TokenTree, tokens: Sequence[int]) -> tuple[int, int]:
    """How many of ``tokens`` lie on a path from the root, and the last node of that path."""
    held, parents, probes, node = tree.tokens, tree.parents, tree.probes, ROOT
    for count, token in enumerate(tokens):
        # Without a call for each token: every step walks down every draft.
        for child in range(node + 1, len(held)):
            if parents[child] == node and held[child] == token and child not in probes:
                node = child
                break
        else:
            return count, node
    return len(tokens), node


def child_with(tree: TokenTree, node: int, token: int) -> int | None:
    """The first child of ``node`` that holds ``token`` and is no probe; None: there is none.

    >>> fork = TokenTree(tokens=(7, 8, 9, 5), parents=(ROOT, 0, 1, 1), sources=("suffix",) * 4)
    >>> child_with(fork, 1, 5)
    3
    """
    tokens, parents = tree.tokens, tree.parents
    for child in range(node + 1, len(tokens)):
        if parents[child] == node and tokens[child] == token and child not in tree.probes:
            return child
    return None


def descend(tree: TokenTree, tokens: Sequence[int]) -> TokenTree | None:
    """What remains of a tree below the path ``tokens`` once these are committed; None if the tree has no such path.

    Each score is divided by the path's, so that it claims the rest of its path. Probes are dropped: they were made for
    another position.

    The source claimed 0.5 for 7 and 0.25 for 7 8. Once 7 is committed, it claims a half for 8:

    >>> descend(chain([7, 8], "suffix", [0.5, 0.25]), [7])
    TokenTree(tokens=(8,), parents=(-1,), sources=('suffix',), scores=(0.5,), probes=(), proposals=())
    """
    node, score = ROOT, 1.0
    for token in tokens:
        found = child_with(tree, node, token)
        if found is None:
            return None
        node, score = found, tree.scores[found] if tree.scores else 1.0
    kept: list[int] = []
    place = {node: ROOT}
    for child in range(node + 1, len(tree)):
        if tree.parents[child] in place and child not in tree.probes:
            place[child] = len(kept)
            kept.append(child)
    return TokenTree(
        tokens=tuple(tree.tokens[child] for child in kept),
        parents=tuple(place[tree.parents[child]] for child in kept),
        sources=tuple(tree.sources[child] for child in kept),
        scores=tuple(min(1.0, tree.scores[child] / score) if score > 0 else 0.0 for child in kept) if tree.scores else (),
    )


def likely_ends(parents: Sequence[int], chances: Sequence[float]) -> list[tuple[int, float]]:
    """The nodes, and ``ROOT``, with the chance that the accepted path ends there, likeliest first.

    >>> likely_ends((ROOT, 0), (0.75, 0.5))
    [(1, 0.5), (-1, 0.25), (0, 0.25)]

    Args:
        chances: for each node, the probability that the target accepts the path to it.
    """
    rest = {ROOT: 1.0, **dict(enumerate(chances))}
    for parent, chance in zip(parents, chances, strict=True):
        rest[parent] -= chance
    return sorted(rest.items(), key=lambda end: -end[1])


def take(tree: TokenTree, kept: list[int]) -> TokenTree:
    """The sub-tree of the nodes ``kept``, ascending.

    Nodes are numbered anew. Without 9, token 5 is node 2, still below node 1:

    >>> fork = TokenTree(tokens=(7, 8, 9, 5), parents=(ROOT, 0, 1, 1), sources=("suffix",) * 4)
    >>> part = take(fork, [0, 1, 3])
    >>> part.tokens, part.parents
    ((7, 8, 5), (-1, 0, 1))

    Raises:
        ValueError: a node is kept without its parent.
    """
    place = {ROOT: ROOT} | {node: index for index, node in enumerate(kept)}
    if any(tree.parents[node] not in place for node in kept):
        raise ValueError("a node is kept without its parent")
    return TokenTree(
        tokens=tuple(tree.tokens[node] for node in kept),
        parents=tuple(place[tree.parents[node]] for node in kept),
        sources=tuple(tree.sources[node] for node in kept),
        scores=tuple(tree.scores[node] for node in kept) if tree.scores else (),
        probes=tuple(place[node] for node in tree.probes if node in place),
    )
