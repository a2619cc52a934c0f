"""``TokenTree`` <-> tree.proto."""

from __future__ import annotations

from outrider.internal.v1 import tree_pb2
from speculation import limits
from speculation.errors import MalformedTree
from speculation.types import Proposal, TokenTree


def encode_tree(tree: TokenTree) -> tree_pb2.TokenTree:
    made = tree_pb2.TokenTree()
    write_tree(tree, made)
    return made


def write_tree(tree: TokenTree, made: tree_pb2.TokenTree) -> None:
    """Encode into an empty message: one that is made apart would be copied into the message that holds it."""
    if not len(tree):
        return
    names = list(dict.fromkeys(tree.sources))
    made.tokens.extend(tree.tokens)
    made.parents.extend(tree.parents)
    made.sources.extend(map(names.index, tree.sources))
    made.source_names.extend(names)
    made.scores.extend(tree.scores)
    # Most trees have neither.
    if tree.probes:
        made.probes.extend(tree.probes)
    if tree.proposals:
        made.proposals.extend(
            tree_pb2.Proposal(token_ids=q.token_ids, probabilities=q.probabilities) for q in tree.proposals
        )


def decode_tree(wire: tree_pb2.TokenTree) -> TokenTree:
    """Decode a tree and check its sizes. ``speculation.tree.validate`` checks whether it is well-formed.

    Raises:
        MalformedTree: a field is too long, or a source has no name.
    """
    # Slices are lists, which are made in one go.
    tokens, sources, names = tuple(wire.tokens[:]), tuple(wire.sources[:]), tuple(wire.source_names[:])
    parents, scores, probes, proposals = tuple(wire.parents[:]), tuple(wire.scores[:]), tuple(wire.probes[:]), wire.proposals
    if max(map(len, (tokens, parents, sources, scores, probes, proposals))) > limits.MAX_TREE_NODES:
        _refuse_long(wire)
    if len(names) > limits.MAX_SOURCES:
        raise MalformedTree("tree.source_names", f"{len(names)} names", f"at most {limits.MAX_SOURCES}")
    for name in names:
        if len(name) > limits.MAX_SOURCE_NAME:
            raise MalformedTree("tree.source_names", name, f"names of at most {limits.MAX_SOURCE_NAME} characters")
    if sources and max(sources) >= len(names):
        node, index = next((node, index) for node, index in enumerate(sources) if index >= len(names))
        raise MalformedTree(f"tree.sources[{node}]", index, f"below {len(names)}")
    return TokenTree(
        tokens=tokens,
        parents=parents,
        sources=names * len(sources) if len(names) == 1 else tuple([names[index] for index in sources]),
        scores=scores,
        probes=probes,
        proposals=tuple([Proposal(token_ids=tuple(q.token_ids), probabilities=tuple(q.probabilities)) for q in proposals])
        if proposals
        else (),
    )


def _refuse_long(wire: tree_pb2.TokenTree) -> None:
    for name in ("tokens", "parents", "sources", "scores", "probes", "proposals"):
        if len(getattr(wire, name)) > limits.MAX_TREE_NODES:
            raise MalformedTree(f"tree.{name}", f"{len(getattr(wire, name))} entries", f"at most {limits.MAX_TREE_NODES}")
