"""Quantised checkpoints of mixtures: experts stay in blocks, and every bit is the float model's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from cluster.checks.model_files import expanded
from cluster.models.target import resolve
from cluster.settings.components import VerifierSettings
from services.model_files.weights.files import WeightFiles
from services.verifier.kernels.exact_weights import ExactWeight
from services.verifier.loading.load_model import load_layers, load_whole
from services.verifier.loading.model_size import shape_of
from services.verifier.model.means import MEANS
from services.verifier.model.new_weights import NewWeights
from services.verifier.model.slice import ModelSlice
from speculation.errors import ConfigurationError
from speculation.sources import STRATEGIES
from tests.engine.virtual_ranks import ranks_of, together
from tests.kernels.kernels_here import needs_kernels
from tests.lossless.test_quantised import KEPT_AS, of
from tests.lossless.test_strategies import ANSWER, PROMPTS, plan_of, said, verifier
from tests.lossless.test_tensor_parallel import MIXTURES, config, passes
from tests.running.refusals import refuses
from tests.tiny_models.gpt_oss import make_gpt_oss
from tests.tiny_models.new_weights import other_weights
from tests.tiny_models.quantised import FORMS, Make, each_once, quantise
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.tiny_gguf import make_tiny_mixture_gguf

pytestmark = needs_kernels

FILE = "model.safetensors"
# Two ranks have whole vectors of all of them.
SIZES = {
    "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = ("gate_up_proj", "down_proj")
GPTQ, AWQ, FP8 = "gptq", "awq", "fp8_blocks_of_32"
# The types that hold other formats' experts, which the slow tests add.
OTHERS = (
    "compressed_w4_halves",
    "gptq_8_bits_zeros",
    "compressed_fp8_blocks",
    "compressed_mxfp4",
    "compressed_nvfp4",
    "bnb_nf4",
)


def make_random_mixture(folder: Path, *, mixtral: bool = False) -> Path:
    """A Qwen3-MoE or a Mixtral, all of whose experts differ."""
    make_tiny_model(folder, hidden_size=128)
    vocabulary = AutoModelForCausalLM.from_pretrained(folder).config.vocab_size
    torch.manual_seed(0)
    made: Qwen3MoeForCausalLM | MixtralForCausalLM
    if mixtral:
        made = MixtralForCausalLM(MixtralConfig(**SIZES, vocab_size=vocabulary, num_local_experts=4, sliding_window=None))
    else:
        own = {"num_experts": 6, "moe_intermediate_size": 64, "head_dim": 32}
        made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **own, vocab_size=vocabulary))
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def made_of(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    return each_once(mixture, tmp_path_factory)


@pytest.fixture(scope="module")
def gpt_oss(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_gpt_oss(mixture, tmp_path_factory.mktemp("gpt_oss"))


def same_bits(folder: Path, plain: Path) -> dict[str, set[str]]:
    """Compares the logits of a model with those of the float model; the types by which its experts are multiplied, by name."""
    ours = ModelSlice(config(folder, weights="as_stored"), 0)
    assert torch.equal(passes(ours), passes(ModelSlice(config(plain, weights="float32"), 0)))
    found: dict[str, set[str]] = {}
    for module in ours.model.modules():
        for name, value in vars(module).items():
            if isinstance(value, ExactWeight) and value.dim() == 3:
                assert len(value.numbers.packed) == len(value) and not value.numbers.inexact
                found.setdefault(name, set()).update(one.stored_as for one in value.numbers.packed)
    return found


@pytest.mark.parametrize("form", [GPTQ, AWQ, FP8, *(pytest.param(form, marks=pytest.mark.exhaustive) for form in OTHERS)])
def test_experts_are_multiplied_as_they_are_stored(form: str, made_of: Make) -> None:
    folder, plain = made_of(form)
    assert any(".experts.0." in name for name in load_file(folder / FILE))
    assert same_bits(folder, plain) == {name: {KEPT_AS[form]} for name in EXPERTS}
    # Nobody else multiplies by blocks; these are the numbers of transformers' own joining.
    ours = load_whole(of(folder, weights="float32")).state_dict()
    for name, weight in AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).state_dict().items():
        assert torch.equal(ours[name].float(), weight), name


def test_experts_under_other_names(tmp_path: Path) -> None:
    folder, plain = quantise(make_random_mixture(tmp_path / "mixtral", mixtral=True), tmp_path, FORMS[FP8])
    assert same_bits(folder, plain) == {name: {"E4M3"} for name in EXPERTS}


def test_shared_experts_and_dense_layers_beside_them(mixture: Path, tmp_path: Path) -> None:
    """As DeepSeek V3 is published."""
    made, configured, sizes = MIXTURES["shared experts, and latent attention"]
    torch.manual_seed(0)
    plain_config = {**SIZES, **sizes, "num_attention_heads": 8, "vocab_size": 320}
    folder = Path(shutil.copytree(mixture, tmp_path / "deepseek"))
    made(configured(**plain_config)).save_pretrained(folder)
    quantised, plain = quantise(folder, tmp_path, FORMS[FP8])
    assert same_bits(quantised, plain) == {name: {"E4M3"} for name in EXPERTS}


def test_experts_that_files_store_as_one_and_models_the_other_way_round(gpt_oss: tuple[Path, Path]) -> None:
    assert same_bits(*gpt_oss) == {name: {"MXFP4"} for name in EXPERTS}


@pytest.mark.parametrize(
    "kinds", [{"down_exps": "Q6_K", "_exps": "Q4_K"}, {"gate_exps": "Q4_0", "_exps": "Q4_1"}], ids=["alike", "apart"]
)
def test_stacked_experts_of_gguf(kinds: dict[str, str], tmp_path: Path) -> None:
    """Rows are stored by outputs, as they are used. Gates and ups of two types are no matrix of one."""
    gguf = make_tiny_mixture_gguf(tmp_path, {"_norm": "F32", "gate_inp": "F32", **kinds, "token_embd": "Q6_K"})
    told: list[str] = []
    folder = resolve(str(gguf), tmp_path / "cache", say=told.append).path
    theirs = AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file=gguf.name, dtype=torch.float32).state_dict()
    ours = load_whole(of(folder, weights="float32")).state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    up, down = ("float32", "Q4_1") if "gate_exps" in kinds else ("Q4_K", "Q6_K")
    assert same_bits(folder, folder) == {"gate_up_proj": {up}, "down_proj": {down}}
    assert any("gates and ups are of different types" in line for line in told) == (up == "float32")


def test_each_stage_reads_its_own_experts(made_of: Make) -> None:
    folder, plain = made_of(AWQ)
    layers = load_layers(of(folder, stages=2), range(1, 2))
    experts = layers.model.layers[0].mlp.experts
    theirs = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).model.layers[1].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        assert isinstance(getattr(experts, name), ExactWeight)
        assert torch.equal(getattr(experts, name).numbers.plain(), getattr(theirs, name))


@pytest.mark.parametrize("form", [GPTQ, FP8, "mxfp4"])
def test_ranks_hold_outputs_of_all_experts_in_blocks(form: str, made_of: Make, gpt_oss: tuple[Path, Path]) -> None:
    folder, plain = gpt_oss if form == "mxfp4" else made_of(form)
    # Widths that ranks share evenly.
    alone = passes(ModelSlice(config(plain, weights="float32"), 0))
    parts = ranks_of(config(folder, 2, weights="as_stored"))
    assert all(torch.equal(made, alone) for made in together(parts, passes))
    packed = [part.model.get_decoder().layers[0].mlp.experts.down_proj.numbers.packed for part in parts]
    kind = "MXFP4" if form == "mxfp4" else KEPT_AS[form]
    width = 32 if form == "mxfp4" else 64
    assert all({(one.stored_as, one.out_features) for one in some} == {(kind, width)} for some in packed)


async def test_drafts_change_no_token(made_of: Make) -> None:
    folder, plain = made_of(GPTQ)
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    settings = {"max_new_tokens": ANSWER, "do_sample": False, "eos_token_id": None}
    wanted = [reference.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist() for prompt in PROMPTS]
    async with verifier(folder, "real", "in_process", "fixed") as running:
        assert await said(running, plan_of(STRATEGIES["blend"]), {}, together=True) == wanted


def test_the_plan_says_their_memory(made_of: Make, gpt_oss: tuple[Path, Path]) -> None:
    for folder, kind, each in ((made_of(FP8)[0], "E4M3", 36), (gpt_oss[0], "MXFP4", 17)):
        with WeightFiles(folder) as files:
            sizes = {name: torch.Size(files.shape(name)).numel() for name in files.names}
            packed = sum(size for name, size in sizes.items() if files.kind(name) == kind)
        taken = packed * each / 32 + (sum(sizes.values()) - packed) * 4
        assert shape_of(of(folder)).kept_bytes == taken / sum(sizes.values())
        assert packed > sum(sizes.values()) / 2
        said = f" {taken / 2**20:,.0f} MiB in float32, linear layers and experts multiplied as {kind} where that is faster"
        assert said in expanded(VerifierSettings(), folder)
        assert shape_of(of(folder, weights="float32")).kept_bytes is None


def _with_nan(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.clone()
    made.view(torch.uint8).flatten()[0] = 0x7F
    return made


@pytest.mark.parametrize("form", [FP8, "mxfp4"])
def test_damaged_experts_are_refused(form: str, made_of: Make, gpt_oss: tuple[Path, Path], tmp_path: Path) -> None:
    """A code that is NaN, and a power of two that no float is."""
    folder = (gpt_oss if form == "mxfp4" else made_of(form))[0]
    stored = load_file(folder / FILE)
    name = "model.layers.1.mlp.experts." + ("down_proj_scales" if form == "mxfp4" else "3.down_proj.weight")
    stored[name] = torch.full_like(stored[name], 255) if form == "mxfp4" else _with_nan(stored[name])
    for file in folder.iterdir():
        if file.name != FILE:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(stored, tmp_path / FILE, metadata={"format": "pt"})
    with refuses(ConfigurationError, says="model.layers.1.mlp.experts.down_proj holds infinite values or NaN") as caught:
        load_whole(of(tmp_path))
    assert "\n" not in str(caught.value)


def test_new_weights_take_their_place(mixture: Path, made_of: Make, tmp_path: Path) -> None:
    folder, _ = made_of(GPTQ)
    other_weights(mixture, tmp_path / "other")
    new, _ = quantise(tmp_path / "other", tmp_path, FORMS[GPTQ])
    served, wanted = ModelSlice(config(folder), 0), passes(ModelSlice(config(new), 0))
    before = passes(served)
    weights = NewWeights(config(new), served.model, served.choice, MEANS)
    for expected in (wanted, before):
        weights.exchange()
        assert torch.equal(passes(served), expected)
    assert not torch.equal(wanted, before)
