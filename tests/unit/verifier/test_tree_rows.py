"""Requests with a pending token and a tree each go to the target as columns: what they are told, and what is kept."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from services.verifier.config import TargetConfig
from services.verifier.kv_cache.pool import BLOCK
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Prefix, Rows, Sampling, contexts_of, ids_of, reads_all, rows_read, tokens_of
from services.verifier.model.tree_rows import TreeRows, counts_of, sizes_of, top_ks_of
from speculation.acceptance import StopRule, walk
from speculation.types import EMPTY_TREE, SamplingParams, TokenTree
from tests.engine.fakes import random_tree

NEVER = StopRule(stop_token_ids=frozenset(), generated=0, room=1000)
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=5),
    # What is kept counts for what is chosen next.
    SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=1.0),
)
STEPS = 4


def branching(source: random.Random, following: list[int]) -> TokenTree:
    """Wrong tokens, and the two that follow, of which neither is a first child: rows that are kept move. Or nothing."""
    if source.random() < 0.2:
        return EMPTY_TREE
    wrong = [abs(token - 1) for token in following]
    tokens = (wrong[0], following[0], wrong[1], following[1])
    return TokenTree(tokens=tokens, parents=(-1, -1, 1, 1), sources=("a",) * 4)


def decoded(
    target: TransformersTarget, known: list[list[int]] | None, *, columns: bool
) -> tuple[list[list[int]], list[int]]:
    """The texts with their prompts, and how many tokens of each are found in the cache.

    Args:
        known: the texts, by which trees are made; None: there are no trees.
    """
    target.forget("t")
    source = random.Random(3)
    names = [f"r{at}" for at in range(len(PARAMS))]
    texts = [[source.randrange(target.vocab_size) for _ in range(BLOCK - 4)] for _ in names]
    length = len(texts[0])
    for name, text, params in zip(names, texts, PARAMS, strict=True):
        sampling = Sampling(params=params, prompt_length=length)
        assert target.open(name, 2 * BLOCK, Prefix(tokens=tuple(text), tenant="t"), sampling=sampling)
    prompts = zip(names, texts, strict=True)
    target.begin([Rows(request_id=name, context=0, tokens=tuple(text), logits=1) for name, text in prompts])
    for name, text, outcome in zip(names, texts, target.finish(), strict=True):
        target.keep(name, 0, range(length))
        text.append(outcome.choices[0])
    for _ in range(STEPS if known else 3 * STEPS):
        contexts = [len(text) - 1 for text in texts]
        trees = [EMPTY_TREE] * len(texts)
        if known is not None:
            trees = [branching(source, whole[len(text) :][:2]) for whole, text in zip(known, texts, strict=True)]
        batch = TreeRows(names, contexts, [text[-1] for text in texts], trees, [0] * len(names))
        target.begin(batch if columns else [*batch])
        paths = []
        for text, tree, outcome in zip(texts, trees, target.finish(), strict=True):
            accepted = walk(tree, lambda node, choices=outcome.choices: choices[node + 1], NEVER)  # type: ignore[misc]
            text += accepted.tokens
            paths.append(accepted.path)
        if columns:
            target.keep_paths(batch, paths)
            continue
        for name, context, path in zip(names, contexts, paths, strict=True):
            target.keep(name, context, [0, *[1 + node for node in path]])
    for name in names:
        target.close(name)
    found = []
    for text in texts:
        assert target.open("next", 2 * BLOCK, Prefix(tokens=tuple(text), tenant="t"))
        found.append(target.computed("next"))
        target.close("next")
    return texts, found


def test_what_is_kept_by_columns_is_what_rows_leave(tiny_model: Path) -> None:
    target = TransformersTarget(TargetConfig(model_path=str(tiny_model), kv_cache_tokens=2048, max_model_len=512))
    plain, _ = decoded(target, None, columns=False)
    by_rows, by_columns = (decoded(target, plain, columns=columns) for columns in (False, True))
    assert by_columns == by_rows
    texts, found = by_columns
    assert found == [BLOCK] * len(PARAMS)
    for text, whole in zip(texts, plain, strict=True):
        assert text == whole[: len(text)]
    # Trees were accepted, or nothing was told.
    assert sum(map(len, texts)) > len(PARAMS) * (BLOCK - 4 + 1 + STEPS)


@pytest.mark.parametrize("seed", range(20))
def test_columns_say_what_their_rows_say(seed: int) -> None:
    draw = random.Random(seed)
    trees = [random_tree(draw, 6, 50) for _ in range(draw.randint(1, 8))]
    names, contexts = [f"r{at}" for at in range(len(trees))], [draw.randrange(99) for _ in trees]
    batch = TreeRows(names, contexts, [draw.randrange(50) for _ in trees], trees, [draw.choice((0, 4)) for _ in trees])
    rows = [*batch]
    assert [(each.tokens[1:], each.parents) for each in rows] == [(tree.tokens, tree.parents) for tree in trees]
    for told in (ids_of, contexts_of, tokens_of, rows_read, reads_all, counts_of, sizes_of, top_ks_of):
        assert told(batch) == told(rows), told.__name__
