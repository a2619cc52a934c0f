"""Keeps drafts to a grammar: forbidden nodes are dropped before the pass, and forced tokens are drafted."""

from __future__ import annotations

from services.verifier.grammar.grammar_state import GrammarState
from speculation.sources import GRAMMAR
from speculation.tree import ROOT, claims, take
from speculation.types import TokenTree


def within_grammar(tree: TokenTree, state: GrammarState, most: int) -> TokenTree:
    """``tree`` without nodes that can never be taken, and with the tokens that the grammar demands below the others.

    Such tokens claim the probability of their parent's path. Probes stay: they are not for this position.

    Args:
        tree: without proposals.
        most: most tokens that are added below one node.
    """
    kept, forced = _visit(tree, state, most)
    if len(kept) < len(tree):
        forced = {node if node == ROOT else kept.index(node): tokens for node, tokens in forced.items()}
        tree = take(tree, kept)
    return _with_forced(tree, forced) if forced else tree


def _visit(tree: TokenTree, state: GrammarState, most: int) -> tuple[list[int], dict[int, list[int]]]:
    """The nodes that the grammar allows, ascending, and what it demands after each of them and after ``ROOT``."""
    below: dict[int, list[int]] = {}
    for child, parent in enumerate(tree.parents):
        below.setdefault(parent, []).append(child)
    probes = set(tree.probes)
    kept: list[int] = []
    forced: dict[int, list[int]] = {}
    # Depth first; None: leave the state entered last.
    stack: list[int | None] = [ROOT]
    while stack:
        if (node := stack.pop()) is None:
            state.leave()
            continue
        if node in probes:
            kept.append(node)
        else:
            if node != ROOT:
                if not state.enter(tree.tokens[node]):
                    continue
                kept.append(node)
                stack.append(None)
            if tokens := state.forced(most):
                forced[node] = tokens
        stack += below.get(node, ())
    return sorted(kept), forced


def _with_forced(tree: TokenTree, forced: dict[int, list[int]]) -> TokenTree:
    tokens, parents, sources, scores = list(tree.tokens), list(tree.parents), list(tree.sources), claims(tree)
    probes = set(tree.probes)
    place = {(parent, tokens[node]): node for node, parent in enumerate(parents) if node not in probes}
    for node, demanded in forced.items():
        score = 1.0 if node == ROOT else scores[node]
        for token in demanded:
            at = place.setdefault((node, token), len(tokens))
            if at == len(tokens):
                tokens.append(token)
                parents.append(node)
                sources.append(GRAMMAR)
                scores.append(score)
            elif scores[at] < score:
                sources[at], scores[at] = GRAMMAR, score
            node = at
    return TokenTree(
        tokens=tuple(tokens), parents=tuple(parents), sources=tuple(sources), scores=tuple(scores), probes=tree.probes
    )
