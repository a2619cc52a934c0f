"""GPTQ's act-order: inputs of a group lie apart in the model and together in the blocks, and rows meet them in that order.

A row's sums are in the order of the blocks, the same alone, in a batch, in a tree, over stages and over ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from services.model_files.weights.files import WeightFiles, quantize_folder
from services.model_files.weights.quantised.integers import scaled_integers
from services.model_files.weights.stored_blocks import StoredBlocks, alike, joined
from services.verifier.kernels.native.layer_kernel import FusedLayer
from services.verifier.kernels.native.library import instruction_sets, library
from services.verifier.kernels.native.linear_kernel import NativeLinear
from services.verifier.loading.model_size import shape_of
from services.verifier.model.means import MEANS
from services.verifier.model.new_weights import NewWeights
from services.verifier.model.slice import ModelSlice
from services.verifier.model.target import TransformersTarget
from services.verifier.service import arithmetic_of
from speculation.sources import STRATEGIES
from tests.engine.fakes import PLAIN
from tests.engine.stage_forks import launch_fork
from tests.engine.virtual_ranks import ranks_of, together
from tests.kernels.kernels_here import kernels_of, needs_kernels
from tests.lossless.test_quantised import FILE, TEXT, logits, of
from tests.lossless.test_quantised_mixtures import make_random_mixture
from tests.lossless.test_strategies import ANSWER, PROMPTS, plan_of, said, verifier
from tests.lossless.test_tensor_parallel import SIZES, config, passes
from tests.tiny_models.new_weights import other_weights
from tests.tiny_models.quantised import FORMS, Make, each_once, quantise
from tests.tiny_models.tiny import make_tiny_model

pytestmark = needs_kernels

FORM = "gptq_ordered"
OUTPUTS, INPUTS, GROUP = 72, 192, 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), **SIZES)


@pytest.fixture(scope="module")
def made_of(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    return each_once(model, tmp_path_factory)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_mixture(tmp_path_factory.mktemp("mixture"))


def scattered(seed: int, outputs: int = OUTPUTS) -> tuple[StoredBlocks, torch.Tensor]:
    """Blocks of inputs that belong to groups at random, and the numbers that the format defines."""
    drawn = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (outputs, INPUTS), generator=drawn)
    zeros = torch.randint(0, 16, (outputs, INPUTS // GROUP), generator=drawn)
    scales = (torch.randn(outputs, INPUTS // GROUP, generator=drawn) / 50).half()
    groups = torch.randperm(INPUTS, generator=drawn) // GROUP
    blocks = scaled_integers(codes, zeros, scales, groups)
    assert isinstance(blocks, StoredBlocks) and blocks.kind == "Q4_Z"
    return blocks, (codes - zeros[:, groups]).float() * scales.float()[:, groups]


def test_blocks_hold_the_numbers_of_the_format() -> None:
    blocks, numbers = scattered(1)
    assert blocks.order is not None and torch.equal(blocks.float(), numbers)
    assert torch.equal(blocks.rows(3, 9).float(), numbers[3:9])
    assert torch.equal(joined([blocks.rows(0, 8), blocks.rows(40, 72)]).float(), torch.cat([numbers[:8], numbers[40:]]))
    # Another order is no part of the same product.
    other, _ = scattered(2)
    assert (
        alike([blocks, blocks.rows(0, 8)])
        and not alike([blocks, other])
        and not alike([blocks, replace(blocks, order=None)])
    )


def test_groups_of_different_sizes_become_numbers() -> None:
    groups = torch.arange(INPUTS) // GROUP
    groups[0] = 1
    codes, scales = torch.randint(0, 16, (OUTPUTS, INPUTS)), torch.rand(OUTPUTS, INPUTS // GROUP).half()
    made = scaled_integers(codes, 8, scales, groups)
    assert isinstance(made, torch.Tensor)
    assert torch.equal(made, (codes - 8).float() * scales.float()[:, groups])


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("instructions", instruction_sets())
def test_kernels_sum_in_the_order_of_the_blocks(instructions: str, rows: int) -> None:
    kernels = kernels_of(instructions)
    blocks, numbers = scattered(1)
    assert blocks.order is not None
    given = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(rows))
    made = NativeLinear(kernels, blocks, None)(given)
    expected = NativeLinear(kernels, numbers[:, blocks.order].contiguous(), None)(given[:, blocks.order].contiguous())
    assert torch.equal(made, expected)
    assert torch.equal(NativeLinear(kernels, blocks, None)(given[rows // 2]), made[rows // 2])
    # Weights one by one.
    assert torch.equal(NativeLinear(kernels, blocks, None)(torch.eye(INPUTS)[:rows]), numbers.T[:rows])
    # An order in which two places are exchanged shows.
    wrong = blocks.order.clone()
    wrong[[3, 150]] = wrong[[150, 3]]
    assert not torch.equal(NativeLinear(kernels, replace(blocks, order=wrong), None)(given), expected)


def test_experts_have_orders_of_their_own() -> None:
    """One of them none; all in one call as each by itself."""
    kernels = library()
    assert kernels is not None
    blocks = [scattered(seed)[0] for seed in (1, 2)]
    layers = [NativeLinear(kernels, one, None) for one in (*blocks, replace(blocks[0], order=None))]
    multiply = NativeLinear.together(layers)
    assert multiply is not None
    given, ends = torch.randn(120, INPUTS), [1, 100, 120]
    made = multiply(given, torch.tensor([2, 0, 1]), torch.tensor(ends))
    alone = [layers[2](given[:1]), layers[0](given[1:100]), layers[1](given[100:])]
    assert torch.equal(made, torch.cat(alone))


def test_whole_layers_say_the_same_of_a_row_in_any_batch(made_of: Make) -> None:
    folder, plain = made_of(FORM)
    target = TransformersTarget(of(folder, weights="as_stored"))
    layers = target._part.model.get_decoder().layers
    assert all(isinstance(layer.forward, FusedLayer) for layer in layers)
    held = [module for module in target._part.model.modules() if isinstance(module, NativeLinear)]
    assert {one.stored_as for one in held if one.order is not None} == {"Q4_Z"}
    assert sum(one.order is not None for one in held) == 4 * len(layers)
    made = logits(folder, weights="as_stored")
    # Up to the order of sums, those of the float model.
    torch.testing.assert_close(made, logits(plain, weights="float32"), rtol=1e-3, atol=1e-4)
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)(torch.tensor([TEXT])).logits[0]
    assert torch.equal(made[: len(TEXT)].argmax(-1), reference.argmax(-1))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_and_stages_say_the_same_bits(ranks: int, made_of: Make) -> None:
    folder, _ = made_of(FORM)
    alone = passes(ModelSlice(config(folder, weights="as_stored"), 0))
    parts = ranks_of(config(folder, ranks, weights="as_stored"))
    assert all(torch.equal(made, alone) for made in together(parts, passes))
    assert any(isinstance(one, NativeLinear) and one.order is not None for one in parts[0].model.modules())


@pytest.mark.exhaustive
def test_two_stages_say_the_same_bits(made_of: Make) -> None:
    from tests.lossless.test_stages import passes as whole_passes

    folder, _ = made_of(FORM)
    target = TransformersTarget(of(folder, stages=2, threads=1, weights="as_stored"), launch_fork)
    try:
        alone = TransformersTarget(of(folder, threads=1, weights="as_stored"))
        assert torch.equal(whole_passes(target), whole_passes(alone))
    finally:
        target.shutdown()


def test_experts_over_ranks(mixture: Path, tmp_path: Path) -> None:
    folder, plain = quantise(mixture, tmp_path, FORMS[FORM])
    # Each expert was quantised in an order of its own.
    weights = load_file(folder / FILE)
    for number in (1, 3):
        _turn(weights, f"model.layers.0.mlp.experts.{number}", number)
    save_file(weights, folder / FILE, metadata={"format": "pt"})
    alone = passes(ModelSlice(config(folder, weights="as_stored"), 0))
    assert all(torch.equal(made, alone) for made in together(ranks_of(config(folder, 2, weights="as_stored")), passes))
    assert not torch.equal(alone, passes(ModelSlice(config(plain, weights="float32"), 0)))
    ours = ModelSlice(config(folder, weights="as_stored"), 0)
    held = ours.model.get_decoder().layers[0].mlp.experts.down_proj.numbers.packed
    orders = [one.order for one in held]
    assert all(one.stored_as == "Q4_Z" for one in held) and not torch.equal(orders[1], orders[2])


def _turn(weights: dict[str, torch.Tensor], expert: str, by: int) -> None:
    for name, weight in weights.items():
        if name.startswith(expert) and name.endswith("g_idx"):
            weights[name] = weight.roll(by)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9, "seed": 2}], ids=str)
async def test_drafts_change_no_token(sampling: dict[str, object], made_of: Make) -> None:
    folder, plain = made_of(FORM)
    async with verifier(folder, "real", "in_process", "fixed") as running:
        wanted = await said(running, PLAIN, sampling, together=False)
        assert await said(running, plan_of(STRATEGIES["blend"]), sampling, together=True) == wanted
    if not sampling:
        reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        settings = {"max_new_tokens": ANSWER, "do_sample": False, "eos_token_id": None}
        theirs = [reference.generate(torch.tensor([one]), **settings)[0, len(one) :].tolist() for one in PROMPTS]
        assert wanted == theirs


def test_new_weights_take_their_place(model: Path, made_of: Make, tmp_path: Path) -> None:
    folder, _ = made_of(FORM)
    new, _ = quantise(other_weights(model, tmp_path / "other"), tmp_path, FORMS[FORM])
    weights = load_file(new / FILE)
    _turn(weights, "model.layers.1", 5)
    save_file(weights, new / FILE, metadata={"format": "pt"})
    served = ModelSlice(config(folder, weights="as_stored"), 0)
    wanted, before = passes(ModelSlice(config(new, weights="as_stored"), 0)), passes(served)
    loaded = NewWeights(config(new, weights="as_stored"), served.model, served.choice, MEANS)
    for expected in (wanted, before):
        loaded.exchange()
        assert torch.equal(passes(served), expected)
    assert not torch.equal(wanted, before)


def test_answers_move_only_where_sums_have_the_same_order(made_of: Make) -> None:
    """As floats, inputs are added up in their own order; of other forms blocks have that, too."""
    for form, differ in ((FORM, True), ("awq", False)):
        folder, _ = made_of(form)
        found = set()
        for weights in ("as_stored", "float32"):
            settings = of(folder, weights=weights)
            found.add(arithmetic_of(TransformersTarget(settings), settings, ""))
        assert len(found) == 1 + differ


def test_the_plan_and_what_is_written_again(made_of: Make, tmp_path: Path) -> None:
    folder, plain = made_of(FORM)
    sizes = {name: tensor.numel() for name, tensor in load_file(plain / FILE).items()}
    packed = sum(size for name, size in sizes.items() if name.endswith("_proj.weight"))
    assert shape_of(of(folder)).kept_bytes == (packed * 20 / 32 + (sum(sizes.values()) - packed) * 4) / sum(sizes.values())
    for file in plain.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    quantize_folder(tmp_path)
    with WeightFiles(folder) as files, WeightFiles(tmp_path) as others:
        assert files.reordered and not others.reordered
