"""Both acceptance rules under a grammar, enumerated exactly on five tokens; wrong masks fail the same test."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from typing_extensions import override

from services.verifier.choosing.chooser import Chooser
from services.verifier.grammar.drafts_within import within_grammar
from services.verifier.grammar.grammar_state import GrammarState
from services.verifier.model.target_port import PackedBits, Rows, Sampling, TokenRule
from speculation import acceptance, rejection
from speculation.acceptance import StopRule
from speculation.errors import Internal
from speculation.rejection import Distribution
from speculation.types import SamplingParams, TokenTree
from tests.lossless.enumeration import Oracle, Output, distance, outcomes, sampled_tree, tree_of, trials
from tests.servers.answer_forms import grammar_state, letters

TOKENS = ("a", "b", "ab", "c")
TOKENIZER, END = letters(*TOKENS)
(EOS,) = END
VOCAB = len(TOKENS) + 1
LENGTH = 4
REGEX = "(a|bc)(b|a)?c?(ab|c)?"
STOP = StopRule(stop_token_ids=END, generated=0, room=LENGTH)
# The chooser's logits are float32.
EXACT = 1e-6

Rule = Callable[[TokenTree, Oracle], Output]


def target(prefix: Sequence[int]) -> Distribution:
    """p after ``prefix`` without a grammar."""
    weights = np.random.default_rng([5, len(prefix), *prefix]).random(VOCAB) ** 2 + 0.02
    return weights / weights.sum()


def draft(prefix: Sequence[int]) -> Distribution:
    """q after ``prefix``; it knows no grammar."""
    other = np.random.default_rng([6, len(prefix), *prefix]).random(VOCAB) + 0.02
    mixed = 0.5 * target(prefix) + 0.5 * other / other.sum()
    mixed[EOS] = 0.0
    return mixed / mixed.sum()


def state() -> GrammarState:
    return grammar_state(TOKENIZER, END, "regex", REGEX)


@cache
def constrained(prefix: tuple[int, ...]) -> tuple[float, ...]:
    """p after ``prefix`` under the grammar, by a matcher that has seen nothing else."""
    fresh = state()
    fresh.commit(prefix)
    bits = fresh.allowed(())
    assert bits is not None
    p = np.where(np.unpackbits(bits, count=VOCAB, bitorder="little"), target(prefix), 0.0)
    return tuple((p / p.sum()).tolist())


def complete(tokens: Sequence[int], oracle: Oracle) -> Output:
    """Cut or continue plainly to the end, or to ``LENGTH`` tokens. What the grammar forbids has no continuation."""
    output = list(tokens[:LENGTH])
    while len(output) < LENGTH and EOS not in output:
        try:
            p = constrained(tuple(output))
        except Internal:
            break
        output.append(oracle.choose(p))
    return tuple(output)


def plain() -> dict[Output, float]:
    return outcomes(lambda oracle: complete((), oracle))


def seen(tree: TokenTree, rule: TokenRule) -> list[Distribution]:
    """What the chooser makes of the target's logits after the root and after each node."""
    made = Chooser(END)
    made.open("r", Sampling(params=SamplingParams(temperature=1.0), prompt_length=1, rule=rule))
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(tree.parents):
        paths.append((*paths[parent + 1], tree.tokens[node]))
    logits = torch.tensor(np.log([target(path) for path in paths]), dtype=torch.float32)
    rows = Rows(request_id="r", context=0, tokens=(0, *tree.tokens), parents=tree.parents, logits=len(paths), tried=tree)
    (outcome,) = made.outcomes([rows], logits)
    assert outcome.distribution is not None
    return [outcome.distribution(row) for row in range(len(paths))]


TREES = {
    "empty": tree_of((), ()),
    "chain": tree_of((0, 1, 3), (-1, 0, 1)),
    "forbidden": tree_of((3, 2, 0), (-1, 0, -1)),
    "branching": tree_of((0, 1, 1, 0, 3, 2, 3), (-1, -1, 0, 0, 2, 4, 1)),
    "wide": tree_of((0, 1, 2, 3, 4), (-1, -1, -1, -1, -1)),
}


def by_rejection(rule: TokenRule, fit: bool = False) -> Rule:
    known: dict[TokenTree, list[Distribution]] = {}

    def run(tree: TokenTree, oracle: Oracle) -> Output:
        if fit:
            tree = within_grammar(tree, state(), 4)
        if tree not in known:
            known[tree] = seen(tree, rule)
        accepted = rejection.accept(tree, trials(tree, lambda node: known[tree][node + 1], oracle), 0, STOP)
        return complete(accepted.tokens, oracle)

    return run


def by_walk(rule: TokenRule, fit: bool = False) -> Rule:
    known: dict[TokenTree, list[Distribution]] = {}

    def run(tree: TokenTree, oracle: Oracle) -> Output:
        if fit:
            tree = within_grammar(tree, state(), 4)
        if tree not in known:
            known[tree] = seen(tree, rule)
        accepted = acceptance.walk(tree, lambda node: oracle.choose(known[tree][node + 1].tolist()), STOP)
        return complete(accepted.tokens, oracle)

    return run


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("fit", [False, True], ids=["as drafted", "within the grammar"])
@pytest.mark.parametrize("rule", [by_walk, by_rejection])
def test_deterministic_trees(rule: Callable[[TokenRule, bool], Rule], name: str, fit: bool) -> None:
    made = rule(state(), fit)
    assert distance(outcomes(lambda oracle: made(TREES[name], oracle)), plain()) < EXACT


SHAPES = [(1, 1), (1, 2), (2, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_sampled_trees_under_rejection(shape: tuple[int, int]) -> None:
    rule = by_rejection(state())
    assert (
        distance(outcomes(lambda oracle: rule(sampled_tree(oracle, draft, *shape, replacement=False), oracle)), plain())
        < EXACT
    )


def test_every_answer_has_the_form() -> None:
    for output, probability in plain().items():
        text = "".join(TOKENS[token] for token in output if token != EOS)
        assert probability > 0
        if EOS in output:
            assert re.fullmatch(REGEX, text)


# --- masks that are wrong, and must be seen to be -----------------------------------------------------------------


class _OfTheRoot:
    """One mask for the whole tree."""

    def __init__(self) -> None:
        self._state = state()

    def allowed(self, path: Sequence[int]) -> PackedBits | None:
        return self._state.allowed(())


class _OfAChain(_OfTheRoot):
    """The first token of a path decides, as where a tree is masked like a chain."""

    @override
    def allowed(self, path: Sequence[int]) -> PackedBits | None:
        return self._state.allowed(path[:1])


class _Forgotten(_OfTheRoot):
    """Nothing is barred below drafted tokens."""

    @override
    def allowed(self, path: Sequence[int]) -> PackedBits | None:
        return None if path else self._state.allowed(())


@pytest.mark.parametrize("wrong", [_OfTheRoot, _OfAChain, _Forgotten], ids=lambda wrong: wrong.__name__)
@pytest.mark.parametrize("rule", [by_walk, by_rejection])
def test_wrong_masks_are_caught(rule: Callable[[TokenRule], Rule], wrong: type[_OfTheRoot]) -> None:
    made = rule(wrong())
    result = outcomes(lambda oracle: made(TREES["branching"], oracle))
    assert sum(result.values()) == pytest.approx(1)
    assert distance(result, plain()) > 1e-3


def test_dropping_drawn_tokens_is_caught() -> None:
    """What the grammar forbids may be dropped from a draft, but not from one whose tokens were drawn from q."""
    rule = by_rejection(state())

    def run(oracle: Oracle) -> Output:
        tree = sampled_tree(oracle, draft, 2, 1, replacement=False)
        allowed = [node for node, token in enumerate(tree.tokens) if constrained(())[token] > 0]
        kept = tree_of(
            tuple(tree.tokens[node] for node in allowed),
            tuple(tree.parents[node] for node in allowed),
            tuple(tree.proposals[node] for node in allowed),
        )
        return rule(kept, oracle)

    assert distance(outcomes(run), plain()) > 1e-3
