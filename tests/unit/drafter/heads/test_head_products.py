"""Heads by the target's kernels: which form a weight takes, and that they draft as by torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from cluster.models.drafters import linear_kernels
from cluster.models.target import ResolvedModel
from cluster.settings.component_configs import drafter_config
from cluster.settings.config import Settings
from services.drafter.config import DrafterConfig, TrainedConfig
from services.drafter.heads.blocks.files import load_blocks
from services.drafter.heads.files.kinds import inspect
from services.drafter.heads.products import HeadProducts, shortest
from services.drafter.sessions.known_states import KnownStates
from services.drafter.sources.catalogue import make_source
from services.drafter.sources.interfaces import DraftWanted, ModelSource
from services.model_files.weights.stored_blocks import StoredBlocks, Weight, quantized, stored_as
from speculation.errors import ConfigurationError
from speculation.messages import OpenSession
from speculation.types import Features, TokenTree
from tests.kernels.kernels_here import needs_kernels
from tests.running.refusals import refuses
from tests.tiny_models import block_checkpoints, head_checkpoints
from tests.tiny_models.head_checkpoints import HIDDEN, LAYERS, HeadCheckpoint
from tests.tiny_models.mtp_layers import alone
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.trained_heads import make_head, make_medusa, make_streams

pytestmark = pytest.mark.usefixtures("seeded")

TEXT = (17, 5, 40, 41, 8, 9, 250)
NODES = 12
# Makes a checkpoint for a target in a folder.
Write = Callable[[Path, Path], Path]
BLOCKS: dict[str, Callable[[], HeadCheckpoint]] = {
    "dflash": block_checkpoints.dflash,
    "dspark": lambda: block_checkpoints.dspark(kind="gated"),
    "domino": block_checkpoints.domino,
    "dflash2": block_checkpoints.dflash2,
}


def written(make: Callable[[], HeadCheckpoint]) -> Write:
    return lambda target, folder: make().write(folder)


# By the source that reads it.
KINDS: dict[str, tuple[str, Write]] = {
    **{kind: ("dflash", written(make)) for kind, make in BLOCKS.items()},
    "eagle": ("eagle", lambda target, folder: make_head(target, folder, "eagle")),
    "eagle3 with rows of its own": ("eagle3", lambda target, folder: head_checkpoints.eagle3().write(folder)),
    "fspad": ("fspad", lambda target, folder: make_head(target, folder, "fspad")),
    "peagle": ("peagle", lambda target, folder: head_checkpoints.peagle().write(folder)),
    "medusa": ("medusa", make_medusa),
    "medusa with rows of its own": ("medusa", lambda target, folder: make_medusa(target, folder, own_output=True)),
    "mtp": ("mtp", alone),
    "streaming": ("streaming", make_streams),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


@pytest.mark.parametrize("inputs", [64, 40])
def test_a_weight_takes_the_shortest_form_that_holds_it(inputs: int) -> None:
    weight = torch.randn(70, inputs)
    for form, numbers in {
        "Q8_0": quantized(weight).float(),
        "bfloat16": weight.bfloat16().float(),
        "float32": weight,
    }.items():
        assert stored_as(shortest(numbers)) == form
        assert torch.equal(shortest(numbers).float(), numbers)


def test_one_row_that_is_no_block_keeps_all_numbers() -> None:
    weight = quantized(torch.randn(200, 64)).float()
    # Not among the rows that are tried first.
    weight[2, 5] += 1e-3
    assert not isinstance(shortest(weight), StoredBlocks) and torch.equal(shortest(weight).float(), weight)


@needs_kernels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rounded", "bound"), [(False, 1e-5), (True, 0.02)])
def test_a_product_is_torch_s(rounded: bool, bound: float, bias: bool) -> None:
    make = linear_kernels()
    assert make is not None
    linear = nn.Linear(96, 50, bias=bias).requires_grad_(False)
    by_kernels = HeadProducts(make, rounded=rounded).over(linear.weight, linear.bias)
    for rows in (1, 4, 8, 30):
        given = torch.randn(2, rows, 96)
        found, expected = by_kernels(given), linear(given)
        assert found.shape == expected.shape
        assert (1e-4 if rounded else 0.0) <= float((found - expected).abs().max()) < bound
        # A row says the same beside others.
        assert torch.equal(by_kernels(given[:, :1]), found[:, :1])


class Counted:
    """Stands for ``linear_kernels``; counts the layers that are made and the rows that they multiply."""

    def __init__(self) -> None:
        self.made = self.rows = 0

    def __call__(self) -> Callable[[Weight, torch.Tensor | None], nn.Module]:
        make = linear_kernels()
        assert make is not None

        def counting(weight: Weight, bias: torch.Tensor | None) -> nn.Module:
            self.made += 1
            layer = make(weight, bias)
            layer.register_forward_pre_hook(self._count)
            return layer

        return counting

    def _count(self, layer: nn.Module, given: tuple[torch.Tensor]) -> None:
        self.rows += given[0].numel() // given[0].shape[-1]


def source_of(kind: str, folder: Path, target: Path, **trained: Any) -> ModelSource:
    name, _ = KINDS[kind]
    config = TrainedConfig(checkpoints={name: folder}, target=target, asked_for=False, num_steps=3, **trained)
    return cast(ModelSource, make_source(name, DrafterConfig(trained=config)))


def drafted(source: ModelSource, kind: str, layers: tuple[int, ...], **opened: Any) -> TokenTree:
    """A draft behind ``TEXT``, of all whose positions but the last the target's states are known."""
    name, _ = KINDS[kind]
    message = OpenSession(session_id="s", tokens=TEXT, prompt_length=1, sources=(name,), max_nodes=NODES, **opened)
    states = KnownStates()
    for position in range(len(TEXT) - 1):
        numbers = np.random.default_rng(position).normal(size=len(layers) * HIDDEN).astype("<f4")
        states.add(
            Features(data=numbers.tobytes(), rows=1, width=len(numbers), dtype="float32", start=position, layers=layers)
        )
    (tree,) = source.draft([DraftWanted(session=source.open(message), max_nodes=NODES, states=states)])
    assert tree is not None and len(tree)
    return tree


@pytest.mark.examples(5)
@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_drafts_as_by_torch(kind: str, target: Path, tmp_path: Path) -> None:
    folder = KINDS[kind][1](target, tmp_path / "head")
    layers, counted = inspect(folder, target).layers, Counted()
    plain = drafted(source_of(kind, folder, target), kind, layers)
    found = drafted(source_of(kind, folder, target, linear_kernels=counted), kind, layers)
    assert (found.tokens, found.parents) == (plain.tokens, plain.parents)
    assert found.scores == pytest.approx(plain.scores, rel=1e-3)
    assert counted.made and counted.rows
    # Rounded, it says nearly the same.
    rounded = drafted(source_of(kind, folder, target, linear_kernels=Counted(), dtype="int8"), kind, layers)
    assert rounded.scores != found.scores
    best = {
        token: score for token, score, parent in zip(plain.tokens, plain.scores, plain.parents, strict=True) if parent < 0
    }
    assert any(abs(best.get(token, 0.0) - score) < 0.1 for token, score in zip(rounded.tokens, rounded.scores, strict=True))


@needs_kernels
def test_the_same_weights_under_other_flags_are_multiplied_as_before(target: Path, tmp_path: Path) -> None:
    drafter = load_blocks(block_checkpoints.dspark().write(tmp_path), target)
    tokens, positions = drafter.block_of(torch.tensor([5]))[None].flatten(1), torch.arange(block_checkpoints.BLOCK)[None]
    alone = lambda query, key, value, layer: value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)  # noqa: E731
    plain = drafter(tokens, positions, alone)
    counted = Counted()
    drafter.multiply_by(HeadProducts(counted()))
    other, before = drafter.under(drafter.config), counted.made
    torch.testing.assert_close(other(tokens, positions, alone), plain, rtol=1e-3, atol=1e-4)
    other.logits(plain, other.vocabulary)
    assert counted.rows and counted.made == before
    assert other.vocabulary.product is drafter.vocabulary.product is not None


def test_without_kernels_torch_multiplies(target: Path, tmp_path: Path) -> None:
    folder = block_checkpoints.dflash().write(tmp_path)
    for without in (TrainedConfig(), TrainedConfig(linear_kernels=lambda: None, dtype="int8")):
        assert HeadProducts.of(without) is None
    layers = inspect(folder, target).layers
    trees = [
        drafted(source_of("dflash", folder, target, **fields), "dflash", layers)
        for fields in ({}, {"linear_kernels": lambda: None}, {"linear_kernels": lambda: None, "dtype": "int8"})
    ]
    assert trees[0] == trees[1] == trees[2]


def test_gpus_and_short_types_are_left_to_torch() -> None:
    for other in (
        TrainedConfig(linear_kernels=Counted(), device="cuda"),
        TrainedConfig(linear_kernels=Counted(), dtype="bfloat16"),
    ):
        assert HeadProducts.of(other) is None


def test_int8_is_refused_on_a_gpu(tiny_model: Path) -> None:
    settings = Settings.model_validate({"drafter": {"dtype": "int8", "device": "cuda"}})
    with refuses(ConfigurationError, field="drafter.dtype", value="int8"):
        drafter_config(settings, ResolvedModel(name="tiny", path=tiny_model))
