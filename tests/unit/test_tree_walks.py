"""The compiled walks of a pass commit what the law commits, on random passes; forms that do not are found."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from services.verifier.engine.native import tree_walks
from services.verifier.engine.native.library import engine_library
from services.verifier.engine.native.tree_walks import Decided, walk_all, walk_each
from services.verifier.model.target_port import NOT_CHOSEN
from speculation.types import EMPTY_TREE, FinishReason, TokenTree
from tests.fakes import random_tree

needs_compiler = pytest.mark.skipif(engine_library() is None, reason="there is no compiler")
VOCABULARY = 4

# Trees, choices, tokens left, and tokens that end answers.
Pass = tuple[list[TokenTree], list[tuple[int, ...]], list[int], "list[array[int]]"]


def a_pass(draw: random.Random) -> Pass:
    """Few tokens, so that paths are long, siblings equal and answers end; probes, unknown choices and empty trees."""
    trees, choices = [], []
    for _ in range(draw.choice((1, 3, 20))):
        tree = random_tree(draw, draw.choice((0, 0, 3, 12, 40)), VOCABULARY)
        if len(tree) and draw.random() < 0.3:
            below = draw.randrange(len(tree))
            tree = replace(tree, probes=tuple(range(below, len(tree))))
        own = [draw.randrange(VOCABULARY) for _ in range(1 + len(tree))]
        if draw.random() < 0.2:
            own[draw.randrange(len(own))] = NOT_CHOSEN
        trees.append(tree)
        choices.append(tuple(own))
    left = [draw.choice((0, 1, 2, 5, 100)) for _ in trees]
    stops = [array("i", draw.sample(range(VOCABULARY + 3), draw.choice((0, 0, 1, 3)))) for _ in trees]
    return trees, choices, left, stops


@needs_compiler
@pytest.mark.parametrize("seed", range(100))
def test_they_commit_the_same(seed: int) -> None:
    given = a_pass(random.Random(seed))
    assert walk_all(*given) == walk_each(*given)


def test_what_a_walk_finds() -> None:
    tree = TokenTree(tokens=(7, 8, 9, 5), parents=(-1, 0, 1, 1), sources=("suffix",) * 4)
    choices = (7, 8, 5, NOT_CHOSEN, 2)
    for stops, expected in (
        ([], ((0, 1, 3), (7, 8, 5, 2), None)),
        ([8], ((0, 1), (7, 8), FinishReason.STOP)),
        ([2], ((0, 1, 3), (7, 8, 5, 2), FinishReason.STOP)),
    ):
        for walks in (walk_all, walk_each):
            assert walks([tree], [choices], [100], [array("i", stops)]) == [expected]
    assert walk_all([tree], [choices], [3], [array("i")]) == [((0, 1, 3), (7, 8, 5), FinishReason.LENGTH)]
    # Only what is reached must be known.
    assert walk_all([tree], [(7, 8, NOT_CHOSEN, 1, 2)], [9], [array("i")]) == [((), (), None)]


Form = Callable[[Sequence[TokenTree], Sequence[Sequence[int]], Sequence[int], "Sequence[array[int]]"], list[Decided]]


def without_stops(
    trees: Sequence[TokenTree], choices: Sequence[Sequence[int]], left: Sequence[int], stops: Sequence[array[int]]
) -> list[Decided]:
    return walk_all(trees, choices, left, [array("i")] * len(trees))


def one_token_late(
    trees: Sequence[TokenTree], choices: Sequence[Sequence[int]], left: Sequence[int], stops: Sequence[array[int]]
) -> list[Decided]:
    return walk_all(trees, choices, [each + 1 for each in left], stops)


def into_probes(
    trees: Sequence[TokenTree], choices: Sequence[Sequence[int]], left: Sequence[int], stops: Sequence[array[int]]
) -> list[Decided]:
    return walk_all([replace(tree, probes=()) for tree in trees], choices, left, stops)


def of_the_next(
    trees: Sequence[TokenTree], choices: Sequence[Sequence[int]], left: Sequence[int], stops: Sequence[array[int]]
) -> list[Decided]:
    return walk_all(trees, choices, [*left[1:], left[0]], [*stops[1:], stops[0]])


@needs_compiler
@pytest.mark.parametrize("wrong", [without_stops, one_token_late, into_probes, of_the_next])
def test_a_wrong_form_is_found(wrong: Form) -> None:
    passes = [a_pass(random.Random(seed)) for seed in range(100)]
    assert any(wrong(*given) != walk_each(*given) for given in passes)


def test_choices_of_another_tree_are_refused() -> None:
    with pytest.raises(ValueError, match="a choice after each"):
        walk_all([EMPTY_TREE, random_tree(random.Random(1), 3, 4)], [(1, 2), (1,)], [9, 9], [array("i")] * 2)


def test_without_a_compiler_the_reference_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_walks, "engine_library", lambda: None)
    assert walk_all([EMPTY_TREE], [(5,)], [1], [array("i")]) == [((), (5,), FinishReason.LENGTH)]
