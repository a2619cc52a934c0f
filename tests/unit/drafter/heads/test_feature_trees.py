"""Trees of drafters of hidden states: their probabilities, EAGLE-2's own trees, and what can pay."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from services.drafter.heads.eagle.head import FeatureHead
from services.drafter.heads.eagle.source import TreeForm
from services.drafter.heads.files.head_config import HeadConfig
from services.drafter.sessions.known_states import KnownStates
from speculation.tree import ROOT, depths, path_to
from speculation.types import TokenTree
from tests.drafters.feature_sources import (
    EAGLE3,
    HEADS,
    counted,
    draft,
    fresh,
    head,
    known,
    log_q,
    opening,
    same,
    source,
    text,
)


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_paths_have_the_probabilities_of_the_head(config: HeadConfig) -> None:
    own, tokens, held = head(config), text(9), known(range(8), config=config)
    tree = fresh(source(config), tokens, held, 20)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    paths = {ROOT: (), **{node: tuple(tree.tokens[each] for each in path_to(tree, node)) for node in range(len(tree))}}
    scores = {ROOT: 1.0, **dict(enumerate(tree.scores))}
    for parent, nodes in children.items():
        logs = log_q(own, tokens, held, paths[parent])
        assert [tree.tokens[node] for node in nodes] == logs.topk(len(nodes)).indices.tolist()
        for node in nodes:
            assert tree.scores[node] == pytest.approx(scores[parent] * float(logs[tree.tokens[node]].exp()), rel=1e-4)
    # The likeliest of all whose parents were run.
    assert len(tree) == 20 and max(depths(tree)) >= 3


def published(own: FeatureHead, tokens: Sequence[int], held: KnownStates, total: int, depth: int, top_k: int) -> TokenTree:
    """EAGLE-2's ``topK_genrate``, with its own indices; the model is asked path by path."""
    total_tokens = total - 1
    paths: list[tuple[int, ...]] = [()]
    scores_list, parents_list, ss_token = [], [torch.zeros(1, dtype=torch.long)], []
    top = log_q(own, tokens, held).topk(top_k)
    scores = top.values
    scores_list.append(scores[None])
    ss_token.append(top.indices[None])
    input_ids, topk_cs_index = top.indices, torch.arange(top_k)
    paths = [(token,) for token in input_ids.tolist()]
    for i in range(depth):
        bias = 1 + top_k**2 * max(0, i - 1) + (top_k if i > 0 else 0)
        parents_list.append(topk_cs_index + bias)
        top = torch.stack([log_q(own, tokens, held, path) for path in paths]).topk(top_k)
        cu_scores = top.values + scores[:, None]
        topk_cs = cu_scores.view(-1).topk(top_k)
        topk_cs_index, scores = topk_cs.indices, topk_cs.values
        out_ids = topk_cs_index // top_k
        input_ids = top.indices.view(-1)[topk_cs_index]
        paths = [(*paths[beam], token) for beam, token in zip(out_ids.tolist(), input_ids.tolist(), strict=True)]
        ss_token.append(top.indices)
        scores_list.append(cu_scores)
    all_scores, all_tokens = torch.cat(scores_list).view(-1), torch.cat(ss_token).view(-1)
    top_scores_index = all_scores.topk(total_tokens).indices.sort().values
    draft_parents = torch.cat(parents_list)[top_scores_index // top_k]
    mask_index = torch.searchsorted(top_scores_index, draft_parents - 1)
    mask_index[draft_parents == 0] = -1
    return TokenTree(
        tokens=tuple(all_tokens[top_scores_index].tolist()),
        parents=tuple(mask_index.tolist()),
        sources=("eagle",) * total_tokens,
        scores=tuple(all_scores[top_scores_index].exp().tolist()),
    )


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("total", "depth", "top_k"), [(20, 3, 4), (12, 1, 6), (31, 5, 5)])
def test_eagle_2s_tree_is_the_authors(config: HeadConfig, total: int, depth: int, top_k: int) -> None:
    tokens, held = text(7, seed=3), known(range(6), config=config)
    own = source(config, form=TreeForm(dynamic=total, steps=depth, width=top_k))
    same(fresh(own, tokens, held, 512), published(head(config), tokens, held, total, depth, top_k))


def test_a_tree_holds_what_can_pay() -> None:
    held, tokens = known(range(11)), text(12)
    whole = fresh(source(), tokens, held, 40)
    least = sorted(whole.scores)[25]
    own = source()
    passes = counted(own)
    tree = draft(own, own.open(opening(tokens, prompt_length=1)), held, 40, min_probability=least)
    assert sorted(tree.scores) == sorted(score for score in whole.scores if score >= least)
    assert len(passes) <= 6
    # Nothing pays: one pass, which also brings the cache up to date.
    passes.clear()
    session = own.open(opening(tokens, prompt_length=1))
    assert not len(draft(own, session, held, 40, min_probability=1.0))
    assert len(passes) == 1
    assert draft(own, session, held, 1).tokens == whole.tokens[:1]
    assert passes[1:] == [1]
    # A chain.
    chain = fresh(source(form=TreeForm(steps=3, width=1)), tokens, held, 40)
    assert chain.parents == (-1, 0, 1, 2)


def test_a_requests_own_words_can_be_drafted() -> None:
    ids = [4, 9, 11, 30]
    own, prompt = source(ids=ids), [9, 17, 50, 3, 17]
    tokens = [*prompt, *text(6)]
    session = own.open(opening(tokens, prompt_length=len(prompt)))
    tree = draft(own, session, known(range(10)), 30)
    usable = sorted({*ids, *prompt})
    assert set(tree.tokens) <= set(usable) and set(tree.tokens) & {17, 50, 3}
    # As a head whose vocabulary is both together.
    same(tree, fresh(source(ids=usable), tokens, known(range(10)), 30))
    # Trained output rows are the head's own: others do not fit beside them.
    trained = source(EAGLE3, ids=ids)
    tree = draft(trained, trained.open(opening(tokens, prompt_length=5)), known(range(10), config=EAGLE3), 30)
    assert set(tree.tokens) <= set(ids)
