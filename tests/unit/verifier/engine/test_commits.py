"""What a step commits is noted for many requests in one call as for each alone: hashes, drafts rated, texts that repeat."""

from __future__ import annotations

import random

import pytest

from services.verifier.engine.deciding.repetition import REMEMBERED, Repetition
from services.verifier.engine.native import commits
from services.verifier.engine.native.commits import CompiledRepetition, commit_together, repetition_of
from services.verifier.engine.native.library import engine_library
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.tree import follow_on, path_to
from speculation.types import EMPTY_TREE
from tests.engine.fakes import random_tree

LIBRARY = engine_library()
compiled = pytest.mark.skipif(LIBRARY is None, reason="there is no compiler")


def a_text(draw: random.Random, length: int, vocabulary: int) -> list[int]:
    """It repeats passages of itself."""
    text = [draw.randrange(vocabulary)]
    while len(text) < length:
        begin = draw.randrange(1000)
        text += text[begin : begin + draw.randrange(12)] if draw.random() < 0.6 else [draw.randrange(vocabulary)]
    return text[:length]


@compiled
@pytest.mark.parametrize("seed", range(20))
def test_a_text_is_seen_to_repeat_itself_as_the_reference_sees_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LIBRARY is not None
    draw = random.Random(seed)
    remembered = draw.choice((1, 6, 63, 64, 200, REMEMBERED))
    monkeypatch.setattr("services.verifier.engine.deciding.repetition.REMEMBERED", remembered)
    monkeypatch.setattr(commits, "REMEMBERED", remembered)
    text = a_text(draw, 3000, draw.choice((20, 200, 2**31 - 1)))
    begin = draw.randrange(1000)
    own, reference = CompiledRepetition(LIBRARY, text[:begin]), Repetition(text[:begin])
    began = 0
    while begin < len(text):
        tokens = text[begin : begin + draw.randint(1, 5)]
        own.commit(tokens)
        reference.commit(tokens)
        assert own.begins == reference.begins, begin
        began += own.begins
        begin += len(tokens)
    assert began or remembered < 63


@compiled
@pytest.mark.parametrize("seed", range(20))
def test_requests_commit_together_as_each_does_alone(seed: int) -> None:
    assert LIBRARY is not None
    draw = random.Random(seed)
    count, vocabulary = draw.randint(1, 12), draw.choice((3, 50))
    texts = [a_text(draw, draw.randint(1, 60), vocabulary) for _ in range(count)]
    own, references = [CompiledRepetition(LIBRARY, text) for text in texts], [Repetition(text) for text in texts]
    hashes = [extend_hash(EMPTY_HASH, text) for text in texts]
    for _ in range(30):
        trees = [draw.choice((EMPTY_TREE, random_tree(draw, 6, vocabulary))) for _ in texts]
        committed = [tuple(a_text(draw, draw.randint(1, 5), vocabulary)) for _ in texts]
        for at, tree in enumerate(trees):
            if tree.tokens and draw.random() < 0.5:
                path = path_to(tree, draw.randrange(len(tree)))
                committed[at] = (*[tree.tokens[node] for node in path], *committed[at][: draw.randrange(2)])
        found = commit_together(committed, trees, own, hashes)
        hashes = [extend_hash(before, tokens) for before, tokens in zip(hashes, committed, strict=True)]
        for reference, tokens in zip(references, committed, strict=True):
            reference.commit(tokens)
        assert found.hashes == hashes
        rated = [follow_on(tree, tokens) for tree, tokens in zip(trees, committed, strict=True)]
        assert [*zip(found.right, found.remain, strict=True)] == rated
        assert found.begin == [reference.begins for reference in references]


def test_without_a_compiler_the_reference_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "engine_library", lambda: None)
    assert isinstance(repetition_of([1, 2, 3]), Repetition)
