"""DSpark: a node's children are what its level says behind that node, and as sure as the confidence head is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.drafter.heads.blocks.config import BlockConfig
from services.drafter.heads.blocks.drafter import BlockDrafter
from services.drafter.heads.blocks.files import load_blocks
from services.drafter.heads.files.kinds import inspect
from services.drafter.heads.files.target_rows import read_target_rows
from services.drafter.heads.levels import LevelForm
from services.drafter.sources.interfaces import DraftWanted
from speculation.tree import depths, path_to
from speculation.types import TokenTree
from tests.tiny_models import block_checkpoints as made
from tests.tiny_models.block_checkpoints import BLOCK, MASK, RANK, Formula, guesses
from tests.tiny_models.head_checkpoints import LAYERS, HeadCheckpoint
from tests.tiny_models.tiny import make_tiny_model
from tests.unit.drafter.heads.test_blocks import TEXT, drafted, known, opening, source, state

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


# Of a path of tokens behind the last committed one: the log-probabilities of the next token, and how sure that row is.
After = Callable[[Sequence[int]], tuple[torch.Tensor, float]]


def follows(checkpoint: HeadCheckpoint, embeddings: torch.Tensor, output: torch.Tensor, formula: Formula) -> After:
    """What comes after paths, by the formulas."""
    weights = {name: tensor.double() for name, tensor in checkpoint.tensors.items()}
    states = {position: state(position).double() for position in range(len(TEXT) - 1)}
    rows = guesses(weights, embeddings, states, formula)

    def weighed(path: Sequence[int]) -> torch.Tensor:
        """What W2 is multiplied by: of the last token before, or by the recurrent cell of all of them."""
        state, e = torch.zeros(RANK, dtype=torch.float64), torch.zeros(0)
        for level, token in enumerate((TEXT[-1], *path)):
            e = weights["markov_head.markov_w1.weight"][token]
            if "markov_head.gate_proj.weight" in weights:
                read = torch.cat((rows[level], e))
                gate = weights["markov_head.gate_proj.weight"] @ read + weights["markov_head.gate_proj.bias"]
                e = e / (1 + torch.exp(-gate))
            if "markov_head.joint_proj.weight" in weights:
                read = torch.cat((state, e, rows[level]))
                made_of = weights["markov_head.joint_proj.weight"] @ read + weights["markov_head.joint_proj.bias"]
                gate = 1 / (1 + torch.exp(-made_of[:RANK]))
                state = gate * state + (1 - gate) * torch.tanh(made_of[RANK : 2 * RANK])
                e = torch.tanh(made_of[2 * RANK :])
        return e

    def after(path: Sequence[int]) -> tuple[torch.Tensor, float]:
        level, before = len(path), (TEXT[-1], *path)[-1]
        logits = output @ rows[level] + weights["markov_head.markov_w2.weight"] @ weighed(path)
        sure = 1.0
        if "confidence_head.proj.weight" in weights:
            both = torch.cat((rows[level], weights["markov_head.markov_w1.weight"][before]))
            score = weights["confidence_head.proj.weight"] @ both + weights["confidence_head.proj.bias"]
            sure = float(1 / (1 + torch.exp(-score)))
        return logits.log_softmax(-1), sure

    return after


def is_conditional(tree: TokenTree, after: After, ids: torch.Tensor) -> bool:
    """Whether the tree's scores are products of these conditionals."""
    place = {token: at for at, token in enumerate(ids.tolist())}
    for node in range(len(tree)):
        score, path = 0.0, [tree.tokens[each] for each in path_to(tree, node)]
        for level, token in enumerate(path):
            logs, sure = after(path[:level])
            score += float(logs[place[token]]) + np.log(sure)
        if not np.isclose(np.log(tree.scores[node]), score, atol=1e-4):
            return False
    return True


@pytest.mark.examples(3)
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_draft_is_the_tree_of_its_formulas(tmp_path: Path, target: Path, kind: str) -> None:
    checkpoint = made.dspark(kind=kind)
    drafter = load_blocks(checkpoint.write(tmp_path), target, dtype=torch.float64)
    tree = drafted(source(drafter), known(range(6)))
    assert len(tree) == 40 and 1 < max(depths(tree)) <= BLOCK == drafter.config.levels
    embeddings = checkpoint.tensors["embed_tokens.weight"].double()[torch.tensor([TEXT[-1], *[MASK] * (BLOCK - 1)])]
    output = checkpoint.tensors["lm_head.weight"].double()
    after = follows(checkpoint, embeddings, output, Formula(from_anchor=True))
    assert is_conditional(tree, after, drafter.vocabulary.ids)
    likeliest = set(after(())[0].topk(6).indices.tolist())
    assert {tree.tokens[node] for node in range(len(tree)) if tree.parents[node] == -1} <= likeliest
    # The row before, the token two before, no gate: none of these is what it computes.
    shifted = follows(checkpoint, embeddings, output, Formula(from_anchor=True, shift=1))
    assert not is_conditional(tree, shifted, drafter.vocabulary.ids)
    assert not is_conditional(tree, lambda path: after([*path[:-1], TEXT[0]] if path else ()), drafter.vocabulary.ids)
    assert not is_conditional(tree, lambda path: (after(path)[0], 1.0), drafter.vocabulary.ids)


def test_the_speculators_layout_and_its_draft_vocabulary(tmp_path: Path, target: Path) -> None:
    rows = read_target_rows(target, dtype=torch.float64)
    embeddings = rows.embedding.rows(torch.tensor([TEXT[-1], *[MASK] * (BLOCK - 1)]))
    for anchor in (True, False):
        checkpoint = made.speculators_dspark(**({} if anchor else {"sample_from_anchor": False}))
        folder = checkpoint.write(tmp_path / str(anchor))
        drafter = load_blocks(folder, target, dtype=torch.float64)
        assert drafter.config.from_anchor is anchor and inspect(folder, target).source == "dflash"
        tree = drafted(source(drafter), known(range(6)))
        output = checkpoint.tensors["lm_head.weight"].double()
        after = follows(checkpoint, embeddings, output, Formula(from_anchor=anchor))
        assert is_conditional(tree, after, drafter.vocabulary.ids)


def test_a_large_tree_comes_of_one_pass(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = made.dspark()
    drafter = load_blocks(checkpoint.write(tmp_path), target, dtype=torch.float64)
    passes, forward = [], BlockDrafter.forward

    def counted(own: BlockDrafter, tokens: torch.Tensor, *given: Any) -> torch.Tensor:
        passes.append(tokens.shape)
        return forward(own, tokens, *given)

    monkeypatch.setattr(BlockDrafter, "forward", counted)
    tree = drafted(source(drafter), known(range(6)), nodes=128)
    assert passes == [(1, BLOCK)] and len(tree) == 128 and max(depths(tree)) > 3
    embeddings = checkpoint.tensors["embed_tokens.weight"].double()[torch.tensor([TEXT[-1], *[MASK] * (BLOCK - 1)])]
    after = follows(checkpoint, embeddings, checkpoint.tensors["lm_head.weight"].double(), Formula(from_anchor=True))
    assert is_conditional(tree, after, drafter.vocabulary.ids)


def test_chains_are_drawn_from_q_as_it_is(tmp_path: Path, target: Path) -> None:
    checkpoint = made.dspark()
    own = source(load_blocks(checkpoint.write(tmp_path), target, dtype=torch.float64))
    session = own.open(opening(temperature=1.0, sampled=True))
    (tree,) = own.draft([DraftWanted(session=session, max_nodes=40, states=known(range(6)))])
    assert tree is not None and len(tree) == BLOCK == len(tree.proposals)
    embeddings = checkpoint.tensors["embed_tokens.weight"].double()[torch.tensor([TEXT[-1], *[MASK] * (BLOCK - 1)])]
    after = follows(checkpoint, embeddings, checkpoint.tensors["lm_head.weight"].double(), Formula(from_anchor=True))
    for level, proposal in enumerate(tree.proposals):
        q = after(tree.tokens[:level])[0].exp()[list(proposal.token_ids)]
        assert np.allclose(proposal.probabilities, (q / q.sum()).numpy(), rtol=1e-4)


def test_sessions_share_rounds_and_settings_bound_the_tree(tmp_path: Path, target: Path) -> None:
    own = source(load_blocks(made.dspark().write(tmp_path), target), form=LevelForm(depth=2, width=3))
    sessions = [own.open(opening()), own.open(opening(TEXT[:4]))]
    states = [known(range(6)), known(range(3))]
    trees = own.draft([
        DraftWanted(session=each, max_nodes=40, states=some) for each, some in zip(sessions, states, strict=True)
    ])  # fmt: skip
    for tree, text, some in zip(trees, (TEXT, TEXT[:4]), states, strict=True):
        alone = drafted(own, some, text)
        assert tree is not None and len(tree) == 3 + 9 and max(depths(tree)) == 2
        assert (tree.tokens, tree.parents) == (alone.tokens, alone.parents)
        assert tree.scores == pytest.approx(alone.scores, rel=1e-4)


@pytest.mark.parametrize("make", [made.dspark, made.dflash], ids=["from the anchor", "behind it"])
@pytest.mark.parametrize("causal", [True, False])
def test_levels_that_nobody_asks_for_are_not_computed(
    tmp_path: Path, target: Path, causal: bool, make: Callable[..., HeadCheckpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no row sees those behind it, the others stay as they are."""
    drafter = load_blocks(make(is_causal=causal).write(tmp_path), target, dtype=torch.float64)
    rows: list[int] = []
    forward = BlockDrafter.forward

    def noted(own: BlockDrafter, tokens: torch.Tensor, *given: Any) -> torch.Tensor:
        rows.append(tokens.shape[1])
        return forward(own, tokens, *given)

    monkeypatch.setattr(BlockDrafter, "forward", noted)
    states, form = known(range(6)), LevelForm(depth=2, width=3)
    short = drafted(source(drafter, form=form), states)
    monkeypatch.setattr(BlockConfig, "cut", lambda config, levels: config)
    whole = drafted(source(drafter, form=form), states)
    assert rows == [2 + (not drafter.config.from_anchor) if causal else BLOCK, BLOCK]
    assert (short.tokens, short.parents) == (whole.tokens, whole.parents) and max(depths(short)) == 2
    assert short.scores == pytest.approx(whole.scores, rel=1e-9)


def test_flags_of_other_engines_say_the_same(tmp_path: Path, target: Path) -> None:
    """SpecForge nests them beside the mask and names the kind."""
    plain = made.dspark()
    names = ("markov_rank", "markov_head_type", "enable_confidence_head", "mask_token_id", "target_layer_ids")
    nested = {name: plain.config[name] for name in names} | {"projector_type": "dspark"}
    others = {name: value for name, value in plain.config.items() if name not in names}
    other = HeadCheckpoint(others | {"dflash_config": nested, "model_type": "dspark"}, plain.tensors)
    one, two = (load_blocks(each.write(tmp_path / name), target) for name, each in (("one", plain), ("two", other)))
    assert one.config == two.config
