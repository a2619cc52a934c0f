"""P-EAGLE: what its masks guess by the formulas, from every layout; its trees; and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.drafter.config import DrafterConfig, TrainedConfig
from services.drafter.heads.eagle.parallel import ParallelSource, make
from services.drafter.heads.files.head_files import load_head
from services.drafter.heads.files.kinds import inspect
from services.drafter.heads.levels import LevelForm
from services.drafter.sessions.known_states import KnownStates
from services.drafter.sources.interfaces import DraftWanted
from speculation import limits
from speculation.errors import ConfigurationError
from speculation.messages import OpenSession, StepReport
from speculation.tree import depths, path_to
from speculation.types import Features, TokenTree
from tests.running.refusals import refuses
from tests.tiny_models import head_checkpoints as made
from tests.tiny_models.head_checkpoints import HIDDEN, LAYERS, VOCABULARY, HeadCheckpoint
from tests.tiny_models.tiny import make_tiny_model

pytestmark = pytest.mark.usefixtures("seeded")

TEXT = (17, 5, 40, 41, 8, 9, 250)
WIDTH, LEVELS, MASK = 3 * HIDDEN, 4, 300


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


def state(position: int) -> torch.Tensor:
    """[WIDTH], exactly as float16 holds it."""
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(position)).half()


def known(layers: tuple[int, ...], *positions: int) -> KnownStates:
    found = KnownStates()
    for position in positions:
        data = state(position).numpy().tobytes()
        found.add(Features(data=data, rows=1, width=WIDTH, dtype="float16", start=position, layers=layers))
    return found


def opening(tokens: tuple[int, ...] = TEXT, **fields: Any) -> OpenSession:
    return OpenSession(
        session_id="s", prompt_length=1, tokens=tokens, sources=("peagle",), max_nodes=40, **fields
    )  # fmt: skip


def source(folder: Path, target: Path, **given: Any) -> ParallelSource:
    head = load_head(folder, target, dtype=torch.float64)
    return ParallelSource(head, **{"window": 1000, "form": LevelForm(width=6), **given})


def levels(checkpoint: HeadCheckpoint, prefix: str, lacking: tuple[int, ...] = (), **flags: bool) -> torch.Tensor:
    """[LEVELS, draft vocabulary], log-probabilities behind TEXT, by EAGLE-3's formulas over all rows, masks the last ones."""
    weights = {name: tensor.double() for name, tensor in checkpoint.tensors.items()}
    mask = weights["mask_hidden"].flatten()
    tokens = torch.tensor([*TEXT[1:], *[MASK] * (LEVELS - 1)])
    rows = [mask if position in lacking else state(position).double() for position in range(len(TEXT) - 1)]
    states = torch.stack([*rows, *[mask] * (LEVELS - 1)])
    hidden, _ = made.eagle3_forward(weights, weights["embed_tokens.weight"][tokens], states, flags, prefix)
    return (hidden[-LEVELS:] @ weights["lm_head.weight"].T).log_softmax(-1)


def is_product(tree: TokenTree | None, logs: torch.Tensor) -> bool:
    """Whether the tree's scores are the products of these levels; the draft vocabulary is tokens 3, 9, 15, ..."""
    assert tree is not None and len(tree) == 40
    for node in range(len(tree)):
        path = [(tree.tokens[each] - 3) // 6 for each in path_to(tree, node)]
        if not np.isclose(
            np.log(tree.scores[node]), sum(float(logs[at, token]) for at, token in enumerate(path)), atol=1e-4
        ):
            return False
    return True


LAYOUTS: dict[str, tuple[Callable[[], HeadCheckpoint], str]] = {
    "vLLM": (made.peagle, "midlayer."),
    "one layer": (lambda: made.peagle(layers=1), "midlayer."),
    "pard_token": (lambda: made.peagle(mask_token_id=None, pard_token=MASK), "midlayer."),
    "ptd_token_id": (lambda: made.peagle(mask_token_id=None, ptd_token_id=MASK, parallel_drafting=True), "midlayer."),
    "speculators": (made.speculators_peagle, "layers.0."),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_draft_is_the_tree_of_its_formulas(tmp_path: Path, target: Path, layout: str) -> None:
    make_it, prefix = LAYOUTS[layout]
    checkpoint = make_it()
    own = source(checkpoint.write(tmp_path), target)
    found = inspect(tmp_path, target)
    assert (found.source, inspect(tmp_path, None).source) == ("peagle", "peagle")
    wanted = DraftWanted(session=own.open(opening()), max_nodes=40, states=known(found.layers, *range(6)))
    (tree,) = own.draft([wanted])
    assert is_product(tree, levels(checkpoint, prefix))
    assert tree is not None and max(depths(tree)) <= LEVELS
    # What a missing state, another flag, another mask would say.
    assert not is_product(tree, levels(checkpoint, prefix, lacking=(2,)))
    assert not is_product(tree, levels(checkpoint, prefix, norm_before_residual=True))
    checkpoint.tensors["mask_hidden"] = checkpoint.tensors["mask_hidden"] * 2
    assert not is_product(tree, levels(checkpoint, prefix))


def test_states_that_are_missing_are_masked(tmp_path: Path, target: Path) -> None:
    checkpoint = made.peagle()
    own = source(checkpoint.write(tmp_path), target)
    layers = inspect(tmp_path, target).layers
    (tree,) = own.draft([DraftWanted(session=own.open(opening()), max_nodes=40, states=known(layers, 0, 1, 3, 5))])
    assert is_product(tree, levels(checkpoint, "midlayer.", lacking=(2, 4)))


def test_sessions_go_on_and_share_a_pass(tmp_path: Path, target: Path) -> None:
    own = source(made.peagle().write(tmp_path), target)
    layers = inspect(tmp_path, target).layers
    longer, states = (*TEXT, 3, 99), known(layers, *range(8))
    first, second = own.open(opening()), own.open(opening(longer))
    own.draft([DraftWanted(session=first, max_nodes=40, states=known(layers, *range(6)))])
    first.observe(
        StepReport(session_id="s", committed=(3, 99), length=9, prefix_hash=0, accepted_path=(), max_nodes=40)
    )  # fmt: skip
    trees = own.draft([DraftWanted(session=each, max_nodes=40, states=states) for each in (first, second)])
    (alone,) = own.draft([DraftWanted(session=own.open(opening(longer)), max_nodes=40, states=states)])
    for tree in trees:
        assert tree is not None and alone is not None
        assert (tree.tokens, tree.parents) == (alone.tokens, alone.parents)
        assert tree.scores == pytest.approx(alone.scores, rel=1e-5)


def test_settings_bound_the_tree_and_chains_are_drawn(tmp_path: Path, target: Path) -> None:
    folder = made.peagle().write(tmp_path)
    layers = inspect(folder, target).layers
    trained = TrainedConfig(checkpoints={"peagle": folder}, target=target, num_steps=2, eagle_topk=3)
    own = make(DrafterConfig(trained=trained))
    (tree,) = own.draft([DraftWanted(session=own.open(opening()), max_nodes=40, states=known(layers, *range(6)))])
    assert tree is not None and len(tree) == 3 + 9
    sampled = own.open(opening(temperature=0.8, sampled=True))
    (chain,) = own.draft([DraftWanted(session=sampled, max_nodes=40, states=known(layers, *range(6)))])
    assert chain is not None and len(chain) == 2 == len(chain.proposals)
    one = source(folder, target, form=LevelForm(depth=1, width=5))
    (flat,) = one.draft([DraftWanted(session=one.open(opening()), max_nodes=40, states=known(layers, *range(6)))])
    assert flat is not None and len(flat) == 5


def test_long_texts_take_several_calls(tmp_path: Path, target: Path) -> None:
    checkpoint = made.peagle(max_position_embeddings=4096)
    own = source(checkpoint.write(tmp_path), target, window=4000)
    text = tuple(np.random.default_rng(1).integers(0, 200, 1100).tolist())
    layers = inspect(tmp_path, target).layers
    wanted = DraftWanted(session=own.open(opening(text)), max_nodes=8, states=known(layers, 1098))
    assert own.draft([wanted]) == [None]
    (tree,) = own.draft([wanted])
    assert tree is not None and len(tree) == 8


@pytest.mark.parametrize(
    ("make_it", "change", "field"),
    [
        (made.peagle, {"mask_token_id": VOCABULARY}, "mask_token_id"),
        (made.peagle, {"num_depths": limits.MAX_TREE_NODES + 1}, "speculative_tokens"),
        (made.peagle, {"num_depths": 0}, "num_depths"),
        (made.peagle, {"mask_token_id": None, "parallel_drafting": True}, "mask_token_id"),
        (made.eagle3, {"mask_token_id": 5}, "the tensor mask_hidden"),
        (made.speculators_peagle, {"mask_token_id": "x"}, "mask_token_id"),
        (made.speculators_peagle, {"transformer_layer_config": made.layer_config()}, "num_hidden_layers"),
    ],
)
def test_what_it_cannot_serve_is_refused_by_name(
    tmp_path: Path, target: Path, make_it: Callable[[], HeadCheckpoint], change: dict[str, object], field: str
) -> None:
    checkpoint = make_it()
    checkpoint.config |= change
    folder = checkpoint.write(tmp_path)
    for read in (load_head, inspect):
        with refuses(ConfigurationError, field=field):
            read(folder, target)


def test_other_tensors_are_no_peagle(tmp_path: Path, target: Path) -> None:
    folder = made.eagle(mask_token_id=5).write(tmp_path)
    for read in (load_head, inspect):
        with refuses(ConfigurationError, says="is a P-EAGLE checkpoint: its tensors must be EAGLE-3's"):
            read(folder, target)
    plain = made.eagle3().write(tmp_path / "plain")
    with refuses(ConfigurationError, says="it has no mask token"):
        make(DrafterConfig(trained=TrainedConfig(checkpoints={"peagle": plain}, target=target)))
