"""``TokenTree`` <-> tree.proto."""

from __future__ import annotations

from outrider.internal.v1 import tree_pb2
from speculation import limits
from speculation.errors import InvalidArgument, MalformedTree
from speculation.types import Proposal, TokenTree


def check_size(name: str, size: int, most: int) -> None:
    """Check the size of the field ``name``.

    Raises:
        InvalidArgument: it is above ``most``.
    """
    if size > most:
        raise InvalidArgument(name, f"{size} long", f"at most {most}")


def encode_tree(tree: TokenTree) -> tree_pb2.TokenTree:
    names = list(dict.fromkeys(tree.sources))
    place = {name: index for index, name in enumerate(names)}
    return tree_pb2.TokenTree(
        tokens=tree.tokens,
        parents=tree.parents,
        sources=[place[name] for name in tree.sources],
        source_names=names,
        scores=tree.scores,
        probes=tree.probes,
        proposals=[tree_pb2.Proposal(token_ids=q.token_ids, probabilities=q.probabilities) for q in tree.proposals],
    )


def decode_tree(wire: tree_pb2.TokenTree) -> TokenTree:
    """Decode a tree and check its sizes. ``speculation.tree.validate`` checks whether it is well-formed.

    Raises:
        MalformedTree: a field is too long, or a source has no name.
    """
    for name in ("tokens", "parents", "sources", "scores", "probes", "proposals"):
        if len(getattr(wire, name)) > limits.MAX_TREE_NODES:
            raise MalformedTree(f"tree.{name}", f"{len(getattr(wire, name))} entries", f"at most {limits.MAX_TREE_NODES}")
    if len(wire.source_names) > limits.MAX_SOURCES:
        raise MalformedTree("tree.source_names", f"{len(wire.source_names)} names", f"at most {limits.MAX_SOURCES}")
    for name in wire.source_names:
        if len(name) > limits.MAX_SOURCE_NAME:
            raise MalformedTree("tree.source_names", name, f"names of at most {limits.MAX_SOURCE_NAME} characters")
    for node, index in enumerate(wire.sources):
        if index >= len(wire.source_names):
            raise MalformedTree(f"tree.sources[{node}]", index, f"below {len(wire.source_names)}")
    return TokenTree(
        tokens=tuple(wire.tokens),
        parents=tuple(wire.parents),
        sources=tuple(wire.source_names[index] for index in wire.sources),
        scores=tuple(wire.scores),
        probes=tuple(wire.probes),
        proposals=tuple(
            Proposal(token_ids=tuple(q.token_ids), probabilities=tuple(q.probabilities)) for q in wire.proposals
        ),
    )
