"""Domino: a recurrent cell over the tokens of a path corrects the rows of a block, by the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from services.drafter.heads.blocks.files import load_blocks
from services.drafter.heads.files.kinds import inspect
from services.drafter.heads.files.target_rows import read_target_rows
from speculation.tree import depths
from tests.tiny_models import block_checkpoints as made
from tests.tiny_models.block_checkpoints import BLOCK, MASK, STATE, Formula, guesses
from tests.tiny_models.head_checkpoints import LAYERS
from tests.tiny_models.tiny import make_tiny_model
from tests.unit.drafter.heads.test_blocks import TEXT, drafted, known, source, state
from tests.unit.drafter.heads.test_dspark import is_conditional

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


@pytest.mark.parametrize("shifted", [True, False])
def test_a_draft_is_the_tree_of_its_formulas(tmp_path: Path, target: Path, shifted: bool) -> None:
    checkpoint = made.domino(shift_label=shifted)
    folder = checkpoint.write(tmp_path)
    drafter = load_blocks(folder, target, dtype=torch.float64)
    assert inspect(folder, target).source == "dflash" and drafter.config.from_anchor is shifted
    tree = drafted(source(drafter), known(range(6)))
    weights = {name: tensor.double() for name, tensor in checkpoint.tensors.items()}
    rows = read_target_rows(target, dtype=torch.float64)
    embeddings = rows.embedding.rows(torch.tensor([TEXT[-1], *[MASK] * (BLOCK - 1)]))
    states = {position: state(position).double() for position in range(len(TEXT) - 1)}
    hidden = guesses(weights, embeddings, states, Formula(from_anchor=shifted))

    def after(path: Sequence[int], first: int = 1) -> tuple[torch.Tensor, float]:
        held = torch.zeros(STATE, dtype=torch.float64)
        for token in (TEXT[-1], *path):
            given = weights["prefix_gru.weight_ih_l0"] @ rows.embedding.rows(torch.tensor(token))
            own = weights["prefix_gru.weight_hh_l0"] @ held
            reset, update = (torch.sigmoid(given[at : at + STATE] + own[at : at + STATE]) for at in (0, STATE))
            new = torch.tanh(given[2 * STATE :] + reset * own[2 * STATE :])
            held = (1 - update) * new + update * held
        logits = rows.output.all() @ hidden[len(path)]
        if len(path) >= first:
            inner = weights["embed_proj.0.weight"] @ torch.cat((hidden[len(path)], held))
            logits = logits + weights["embed_proj.2.weight"] @ (inner / (1 + torch.exp(-inner)))
        return logits.log_softmax(-1), 1.0

    ids = drafter.vocabulary.ids
    assert len(tree) == 40 and 1 < max(depths(tree)) <= drafter.config.levels == BLOCK - (not shifted)
    assert is_conditional(tree, after, ids)
    # A correction one level earlier, the path's first token alone: neither is what it computes.
    assert not is_conditional(tree, lambda path: after(path, 0), ids)
    assert not is_conditional(tree, lambda path: after((*path[:-1], TEXT[0]) if path else ()), ids)
