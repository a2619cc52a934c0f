"""Trees of MTP layers: from caches, step by step, with what plain passes over all rows say, whatever the layer attends with."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from services.drafter.heads.eagle.source import FeatureSource
from services.drafter.heads.mtp.files import load_mtp
from speculation.tree import ROOT, depths
from tests.drafters.feature_sources import EAGLE, draft, fresh, known, log_q, opening, report, text
from tests.tiny_models import mtp_layers as made
from tests.tiny_models.head_checkpoints import HIDDEN

STATES = replace(EAGLE, target_hidden_size=HIDDEN)


@pytest.mark.examples(3)
# Latent attention has keys wider than its values.
@pytest.mark.parametrize("kind", ["qwen2", "deepseek_v3", "qwen3_next"])
def test_trees_from_caches_are_those_of_plain_passes(tmp_path: Path, kind: str) -> None:
    target = made.make_of_kind(kind, tmp_path).target
    head = load_mtp(target, target)
    own, tokens = FeatureSource("mtp", head, window=1000), text(20)
    session = own.open(opening(tokens[:6], prompt_length=1))
    for length, further in pairwise((6, 9, 10, 15, 20)):
        held = known(range(length - 1), config=STATES)
        tree, anew = draft(own, session, held), fresh(own, tokens[:length], held)
        assert len(tree) == 12 and max(depths(tree)) > 1
        assert (tree.tokens, tree.parents) == (anew.tokens, anew.parents)
        paths: list[tuple[int, ...]] = []
        for token, parent, score in zip(tree.tokens, tree.parents, tree.scores, strict=True):
            before = () if parent == ROOT else paths[parent]
            paths.append((*before, token))
            chances = torch.stack(
                [log_q(head, tokens[:length], held, paths[-1][:at])[each] for at, each in enumerate(paths[-1])]
            )
            assert score == pytest.approx(float(chances.sum().exp()), rel=1e-3)
        report(session, tokens[length:further])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_draft_in_halves(tmp_path: Path, dtype: torch.dtype) -> None:
    target = made.make_of_kind("glm4_moe", tmp_path).target
    own = FeatureSource("mtp", load_mtp(target, target, dtype=dtype), window=1000)
    assert len(fresh(own, text(9), known(range(8), config=STATES))) == 12
