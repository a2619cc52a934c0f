"""Block drafters: what every layout computes, the trees of one pass, states that come late, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.drafter.config import DrafterConfig, TrainedConfig
from services.drafter.heads.blocks.drafter import BlockDrafter
from services.drafter.heads.blocks.files import load_blocks
from services.drafter.heads.blocks.source import BlockSource, make
from services.drafter.heads.blocks.whole_texts import blocks_of
from services.drafter.heads.files.head_config import FINAL
from services.drafter.heads.files.kinds import inspect
from services.drafter.heads.files.target_rows import read_target_rows
from services.drafter.heads.levels import LevelForm
from services.drafter.sessions.known_states import KnownStates
from services.drafter.sources.interfaces import DraftWanted
from speculation import limits
from speculation.errors import ConfigurationError
from speculation.messages import OpenSession, StepReport
from speculation.tree import depths, path_to
from speculation.types import Features, TokenTree
from tests.running.refusals import refuses
from tests.tiny_models import block_checkpoints as made
from tests.tiny_models.block_checkpoints import BLOCK, DEPTH, MASK, READ, Formula, guesses
from tests.tiny_models.head_checkpoints import HIDDEN, LAYERS, HeadCheckpoint
from tests.tiny_models.tiny import make_tiny_model
from training.convert_pickles import convert

pytestmark = pytest.mark.usefixtures("seeded")

TEXT = (17, 5, 40, 41, 8, 9, 250)
WIDTH = len(READ) * HIDDEN


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


def state(position: int) -> torch.Tensor:
    """[WIDTH], exactly as float16 holds it."""
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(position)).half()


def known(positions: Iterable[int]) -> KnownStates:
    found = KnownStates()
    for position in positions:
        data = state(position).numpy().tobytes()
        layers = tuple(READ)
        found.add(Features(data=data, rows=1, width=WIDTH, dtype="float16", start=position, layers=layers))
    return found


def source(drafter: BlockDrafter, **given: Any) -> BlockSource:
    return BlockSource(drafter, **{"window": 1000, "form": LevelForm(width=6), **given})


def opening(tokens: tuple[int, ...] = TEXT, **fields: Any) -> OpenSession:
    length = fields.pop("prompt_length", 1)
    return OpenSession(
        session_id="s", prompt_length=length, tokens=tokens, sources=("dflash",), max_nodes=40, **fields
    )  # fmt: skip


def committed(tokens: tuple[int, ...], length: int) -> StepReport:
    return StepReport(
        session_id="s", committed=tokens, length=length, prefix_hash=0, accepted_path=(), max_nodes=40
    )  # fmt: skip


def drafted(own: BlockSource, states: KnownStates, tokens: tuple[int, ...] = TEXT, nodes: int = 40) -> TokenTree:
    (tree,) = own.draft([DraftWanted(session=own.open(opening(tokens)), max_nodes=nodes, states=states)])
    assert tree is not None
    return tree


def formula_of(checkpoint: HeadCheckpoint, target: Path, formula: Formula, hidden: Iterable[int] = ()) -> torch.Tensor:
    """[levels, draft vocabulary], log-probabilities behind TEXT by the formulas; positions ``hidden`` have no state."""
    rows = read_target_rows(target, dtype=torch.float64)
    weights = {name: tensor.double() for name, tensor in checkpoint.tensors.items()}
    embeddings = rows.embedding.rows(torch.tensor([TEXT[-1], *[MASK] * (BLOCK - 1)]))
    states = {position: state(position).double() for position in range(len(TEXT) - 1) if position not in set(hidden)}
    output = weights.get("lm_head.weight", rows.output.all())
    return (guesses(weights, embeddings, states, formula) @ output.T).log_softmax(-1)


def is_product(tree: TokenTree, logs: torch.Tensor, ids: torch.Tensor) -> bool:
    """Whether the tree's scores are the products of these levels."""
    place = {token: at for at, token in enumerate(ids.tolist())}
    for node in range(len(tree)):
        path = [place[tree.tokens[each]] for each in path_to(tree, node)]
        if not np.isclose(
            np.log(tree.scores[node]), sum(float(logs[at, token]) for at, token in enumerate(path)), atol=1e-4
        ):
            return False
    return True


LAYOUTS: dict[str, tuple[Callable[[], HeadCheckpoint], Formula]] = {
    "authors": (made.dflash, Formula()),
    "speculators": (made.speculators_dflash, Formula()),
    "causal": (lambda: made.dflash(is_causal=True), Formula(causal=(True,) * DEPTH)),
    "JetSpec": (
        lambda: made.dflash(dflash_config={"mask_token_id": MASK, "target_layer_ids": READ, "causal_head": True}),
        Formula(causal=(True,) * DEPTH),
    ),
    "windows": (
        lambda: made.dflash(layer_types=["sliding_attention", "full_attention"], sliding_window=4, use_sliding_window=True),
        Formula(causal=(True, False), windows=(4, None)),
    ),
    "anchors": (lambda: made.speculators_dflash(sample_from_anchor=True), Formula(from_anchor=True)),
}


@pytest.mark.examples(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_draft_is_the_tree_of_its_formulas(tmp_path: Path, target: Path, layout: str) -> None:
    make_it, formula = LAYOUTS[layout]
    checkpoint = make_it()
    drafter = load_blocks(checkpoint.write(tmp_path), target, dtype=torch.float64)
    tree = drafted(source(drafter), known(range(len(TEXT) - 1)))
    ids, levels = drafter.vocabulary.ids, BLOCK - (not formula.from_anchor)
    assert len(tree) == 40 and max(depths(tree)) <= levels == drafter.config.levels
    assert is_product(tree, formula_of(checkpoint, target, formula), ids)
    # A shifted position, another rope, a state too few, rows that see more or less: none of these is what it computes.
    faults = [
        replace(formula, shift=1),
        replace(formula, theta=10_000.0),
        replace(formula, causal=tuple(not each for each in formula.causal)),
    ]
    for fault in faults:
        assert not is_product(tree, formula_of(checkpoint, target, fault), ids)
    assert not is_product(tree, formula_of(checkpoint, target, formula, hidden=[3]), ids)


@pytest.mark.parametrize("nodes", [128, limits.MAX_TREE_NODES])
def test_large_trees_come_of_one_pass(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    """They are the likeliest paths of what its rows say."""
    checkpoint = made.dflash()
    drafter = load_blocks(checkpoint.write(tmp_path), target, dtype=torch.float64)
    logs = formula_of(checkpoint, target, Formula())
    passes, forward = [], BlockDrafter.forward

    def counted(self: BlockDrafter, tokens: torch.Tensor, *given: Any) -> torch.Tensor:
        passes.append(tokens.shape)
        return forward(self, tokens, *given)

    monkeypatch.setattr(BlockDrafter, "forward", counted)
    tree = drafted(source(drafter), known(range(len(TEXT) - 1)), nodes=nodes)
    assert passes == [(1, BLOCK)] and len(tree) == nodes
    assert is_product(tree, logs, drafter.vocabulary.ids)
    every, paths = torch.zeros(1), []
    for level in logs:
        every = (every[:, None] + level.topk(6).values).flatten()
        paths.append(every)
    best = torch.cat(paths).topk(nodes).values.exp().tolist()
    assert sorted(tree.scores, reverse=True) == pytest.approx(best, rel=1e-4)


def test_layers_are_told_apart_by_layout(tmp_path: Path, target: Path) -> None:
    for name, checkpoint, layers in (
        ("authors", made.dflash(), (1, 3, 6)),
        ("speculators", made.speculators_dflash(), (1, 3, 6)),
        ("both", made.dflash(eagle_aux_hidden_state_layer_ids=[2, 4, 7]), (1, 3, 6)),
        ("last", made.speculators_dflash(aux_hidden_state_layer_ids=[2, 4, LAYERS]), (1, 3, FINAL)),
    ):
        folder = checkpoint.write(tmp_path / name)
        assert load_blocks(folder, target).config.layer.state_layers == layers
        found = inspect(folder, target)
        assert (found.source, found.layers) == ("dflash", layers)
        assert inspect(folder, None).source == "dflash"


def test_other_names_of_tensors_and_engines_prefixes(tmp_path: Path, target: Path) -> None:
    plain = made.dflash()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    other = HeadCheckpoint(plain.config, {f"model.{names.get(name, name)}": each for name, each in plain.tensors.items()})
    one, two = (
        drafted(source(load_blocks(each.write(tmp_path / name), target)), known(range(6)))
        for name, each in (("plain", plain), ("other", other))
    )
    assert one == two
    plain.tensors["model.fc.weight"] = plain.tensors["fc.weight"].clone()
    with refuses(ConfigurationError, field="the tensor model.fc.weight"):
        load_blocks(plain.write(tmp_path / "twice"), target)


def test_factors_of_embeddings_and_logits(tmp_path: Path, target: Path) -> None:
    own = {"mask_token_id": MASK, "target_layer_ids": READ, "output_multiplier": 0.5, "final_logit_softcapping": 2.0}
    checkpoint = made.dflash(dflash_config={**own, "input_embedding_scale": 3.0})
    drafter = load_blocks(checkpoint.write(tmp_path), target, dtype=torch.float64)
    rows = read_target_rows(target, dtype=torch.float64)
    weights = {name: tensor.double() for name, tensor in checkpoint.tensors.items()}
    embeddings = 3 * rows.embedding.rows(torch.tensor([TEXT[-1], *[MASK] * (BLOCK - 1)]))
    states = {position: state(position).double() for position in range(len(TEXT) - 1)}
    logits = guesses(weights, embeddings, states) @ rows.output.all().T / 2
    tree = drafted(source(drafter), known(range(6)))
    assert is_product(tree, (2 * torch.tanh(logits / 2)).log_softmax(-1), drafter.vocabulary.ids)


def test_states_that_are_missing_are_hidden_and_take_their_place_when_they_come(tmp_path: Path, target: Path) -> None:
    checkpoint = made.dflash()
    drafter = load_blocks(checkpoint.write(tmp_path), target, dtype=torch.float64)
    own = source(drafter)
    session, states = own.open(opening()), known([0, 1, 3, 5])
    wanted = DraftWanted(session=session, max_nodes=40, states=states)
    (early,) = own.draft([wanted])
    assert early is not None
    assert is_product(early, formula_of(checkpoint, target, Formula(), hidden=[2, 4]), drafter.vocabulary.ids)
    for position in (4, 2):
        states.add(next(iter(known([position]).runs([position]))))
    (late,) = own.draft([wanted])
    assert late is not None
    assert is_product(late, formula_of(checkpoint, target, Formula()), drafter.vocabulary.ids)


def test_before_the_first_step_it_waits_for_states(tmp_path: Path, target: Path) -> None:
    own = source(load_blocks(made.dflash().write(tmp_path), target))
    session = own.open(opening())
    assert own.draft([DraftWanted(session=session, max_nodes=8, states=known([]))]) == [None]
    assert own.draft([DraftWanted(session=session, max_nodes=0, states=known(range(6)))])[0] is not None


def same(one: TokenTree | None, other: TokenTree | None) -> None:
    assert one is not None and other is not None
    assert (one.tokens, one.parents) == (other.tokens, other.parents)
    assert one.scores == pytest.approx(other.scores, rel=1e-5)


def test_sessions_go_on_and_share_a_pass(tmp_path: Path, target: Path) -> None:
    drafter = load_blocks(made.dflash(sliding_window=None).write(tmp_path), target, dtype=torch.float64)
    own = source(drafter)
    longer = (*TEXT, 3, 99)
    first, second = own.open(opening()), own.open(opening(longer))
    own.draft([DraftWanted(session=first, max_nodes=40, states=known(range(6)))])
    first.observe(committed((3, 99), len(longer)))
    trees = own.draft([
        DraftWanted(session=first, max_nodes=40, states=known(range(8))),
        DraftWanted(session=second, max_nodes=12, states=known(range(8))),
    ])  # fmt: skip
    same(trees[0], drafted(own, known(range(8)), longer))
    same(trees[1], drafted(own, known(range(8)), longer, nodes=12))


def test_a_window_sees_the_latest_positions_alone(tmp_path: Path, target: Path) -> None:
    drafter = load_blocks(made.dflash().write(tmp_path), target, dtype=torch.float64)
    text = tuple(np.random.default_rng(1).integers(0, 200, 600).tolist())
    own = source(drafter, window=16)
    session, states = own.open(opening(text[:590], prompt_length=1)), known(range(600))
    own.draft([DraftWanted(session=session, max_nodes=8, states=states)])
    session.observe(committed(text[590:], 600))
    (tree,) = own.draft([DraftWanted(session=session, max_nodes=12, states=states)])
    same(tree, drafted(source(drafter, window=16), known(range(583, 600)), text, nodes=12))


def test_long_texts_take_several_calls(tmp_path: Path, target: Path) -> None:
    own = source(load_blocks(made.dflash(max_position_embeddings=4096).write(tmp_path), target), window=4000)
    text = tuple(np.random.default_rng(1).integers(0, 200, 1100).tolist())
    wanted = DraftWanted(session=own.open(opening(text)), max_nodes=8, states=known([1098]))
    assert own.draft([wanted]) == [None]
    (tree,) = own.draft([wanted])
    assert tree is not None and len(tree) == 8


def test_chains_are_drawn_for_rejection(tmp_path: Path, target: Path) -> None:
    own = source(load_blocks(made.dflash().write(tmp_path), target))
    session = own.open(opening(temperature=0.8, sampled=True))
    (tree,) = own.draft([DraftWanted(session=session, max_nodes=40, states=known(range(6)))])
    assert tree is not None
    assert len(tree) == BLOCK - 1 == len(tree.proposals) and max(depths(tree)) == BLOCK - 1


def test_blocks_of_a_whole_text_are_those_of_drafts(tmp_path: Path, target: Path) -> None:
    windows = made.dflash(layer_types=["sliding_attention", "full_attention"], sliding_window=4)
    drafter = load_blocks(windows.write(tmp_path), target, dtype=torch.float64)
    tokens = torch.tensor(TEXT)
    states = torch.stack([state(position).double() for position in range(len(TEXT))])
    everywhere = torch.arange(len(TEXT))[None]
    hidden = blocks_of(drafter, tokens[None], states[None], everywhere)[0]
    assert hidden.shape == (len(TEXT), BLOCK - 1, HIDDEN)
    for length in (2, 5, len(TEXT)):
        logs = drafter.logits(hidden[length - 2], drafter.vocabulary).log_softmax(-1)
        tree = drafted(source(drafter), known(range(length - 1)), TEXT[:length])
        assert is_product(tree, logs, drafter.vocabulary.ids)
    # Behind padding, a shorter text and an unknown state beside it, all in one pass with gradients.
    beside = torch.arange(len(TEXT))[None] != 1
    both, there = torch.stack((tokens, tokens)), torch.cat((torch.ones_like(beside), beside))
    with torch.enable_grad():
        again = blocks_of(drafter, both, torch.stack((states, states)), torch.tensor([[3, 1], [3, 2]]), there)
    torch.testing.assert_close(again[0], hidden[[3, 1]])
    logs = drafter.logits(again[1, 0], drafter.vocabulary).log_softmax(-1)
    tree = drafted(source(drafter), known([0, 2, 3]), TEXT[:5])
    assert is_product(tree, logs, drafter.vocabulary.ids)


def test_pickles_are_converted(tmp_path: Path, target: Path) -> None:
    checkpoint = made.dflash()
    plain = checkpoint.write(tmp_path / "plain")
    public = tmp_path / "public"
    public.mkdir()
    torch.save(checkpoint.tensors, public / "pytorch_model.bin")
    (public / "config.json").write_text((plain / "config.json").read_text())
    convert(public, target=target)
    assert drafted(source(load_blocks(public, target)), known(range(6))) == drafted(
        source(load_blocks(plain, target)), known(range(6))
    )


def test_settings_bound_the_tree(tmp_path: Path, target: Path) -> None:
    folder = made.dflash().write(tmp_path)
    trained = TrainedConfig(checkpoints={"dflash": folder}, target=target, num_steps=2, eagle_topk=3)
    own = make(DrafterConfig(trained=trained))
    tree = drafted(own, known(range(6)))
    assert len(tree) == 3 + 9 and max(depths(tree)) == 2
