"""DFlash2: convolutions along the block, and a selector among each row's likeliest tokens, by the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from services.drafter.heads.blocks.files import load_blocks
from services.drafter.heads.files.kinds import inspect
from services.drafter.heads.files.target_rows import read_target_rows
from services.drafter.sources.interfaces import DraftWanted
from speculation.tree import depths
from tests.tiny_models import block_checkpoints as made
from tests.tiny_models.block_checkpoints import BLOCK, CANDIDATES, MASK, guesses
from tests.tiny_models.head_checkpoints import LAYERS
from tests.tiny_models.tiny import make_tiny_model
from tests.unit.drafter.heads.test_blocks import TEXT, drafted, known, opening, source, state
from tests.unit.drafter.heads.test_dspark import is_conditional

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


def test_a_draft_is_the_tree_of_its_formulas(tmp_path: Path, target: Path) -> None:
    checkpoint = made.dflash2()
    folder = checkpoint.write(tmp_path)
    drafter = load_blocks(folder, target, dtype=torch.float64)
    assert inspect(folder, target).source == "dflash"
    tree = drafted(source(drafter), known(range(6)))
    weights = {name: tensor.double() for name, tensor in checkpoint.tensors.items()}
    rows = read_target_rows(target, dtype=torch.float64)
    embeddings = rows.embedding.rows(torch.tensor([TEXT[-1], *[MASK] * (BLOCK - 1)]))
    states = {position: state(position).double() for position in range(len(TEXT) - 1)}
    hidden = guesses(weights, embeddings, states)
    selector = "candidate_selector."

    def after(path: Sequence[int], among: int = CANDIDATES) -> tuple[torch.Tensor, float]:
        level, token = len(path), (TEXT[-1], *path)[-1]
        logits = rows.output.all() @ hidden[level]
        wanted = weights[f"{selector}predecessor_codebook"][token] * (
            weights[f"{selector}hidden_projection.weight"] @ hidden[level]
        )
        likeliest = logits.topk(among).indices
        scores = torch.full_like(logits, -torch.inf)
        scores[likeliest] = logits[likeliest] + weights[f"{selector}successor_codebook"][likeliest] @ wanted
        return scores.log_softmax(-1), 1.0

    ids = drafter.vocabulary.ids
    assert len(tree) == 40 and 1 < max(depths(tree)) <= BLOCK - 1
    assert is_conditional(tree, after, ids)
    # Another token before, more candidates, no convolution: none of these is what it computes.
    assert not is_conditional(tree, lambda path: after([*path[:-1], TEXT[0]] if path else ()), ids)
    assert not is_conditional(tree, lambda path: after(path, 9), ids)
    without = {name: each for name, each in weights.items() if "_conv." not in name}
    hidden = guesses(without, embeddings, states)
    assert not is_conditional(tree, after, ids)


def test_blocks_of_several_sessions_do_not_join(tmp_path: Path, target: Path) -> None:
    own = source(load_blocks(made.dflash2().write(tmp_path), target, dtype=torch.float64))
    batch = [
        DraftWanted(session=own.open(opening(text)), max_nodes=20, states=known(range(len(text) - 1)))
        for text in (TEXT, TEXT[:4])
    ]
    for tree, text in zip(own.draft(batch), (TEXT, TEXT[:4]), strict=True):
        alone = drafted(own, known(range(len(text) - 1)), text, nodes=20)
        assert tree is not None and (tree.tokens, tree.parents) == (alone.tokens, alone.parents)
        assert tree.scores == pytest.approx(alone.scores, rel=1e-6)
