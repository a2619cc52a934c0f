"""Every public layout loads and computes what its formulas say; what cannot be served exactly is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.drafter.heads.eagle.head import FeatureHead, causal
from services.drafter.heads.files.head_config import head_for
from services.drafter.heads.files.head_files import load_head
from services.drafter.heads.files.target_rows import read_target_rows, read_target_shape
from services.drafter.heads.state_head import HeadOutput
from services.model_files.folder import tokenizer_digest
from services.model_files.weights.files import save_blocks
from services.model_files.weights.stored_blocks import quantized
from tests.tiny_models import head_checkpoints as made
from tests.tiny_models.head_checkpoints import DRAFTED, HIDDEN, LAYERS, VOCABULARY, HeadCheckpoint, Tensors, numbers
from tests.tiny_models.tiny import make_tiny_model
from training.head_writing import save_head

pytestmark = pytest.mark.usefixtures("seeded")

ROWS = 6
Outputs = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


def run(head: FeatureHead, tokens: torch.Tensor, states: torch.Tensor) -> HeadOutput:
    return head(head.embed(tokens)[None], head.fuse(states)[None], torch.arange(len(tokens))[None], causal)


def compare(checkpoint: HeadCheckpoint, folder: Path, target: Path, reference: Callable[..., Outputs]) -> FeatureHead:
    """Load the checkpoint, and compare it with its formulas."""
    head = load_head(checkpoint.write(folder), target, dtype=torch.float64)
    tokens, states = torch.randint(0, VOCABULARY, (ROWS,)), torch.randn(ROWS, head.config.state_size, dtype=torch.float64)
    rows = read_target_rows(target, dtype=torch.float64)
    weights = {name: tensor.double() for name, tensor in checkpoint.tensors.items()}
    hidden, state = reference(weights, rows.embedding.rows(tokens), states)
    found = run(head, tokens, states)
    # Rotary frequencies are float32, as everywhere.
    torch.testing.assert_close(found.hidden[0], hidden, atol=2e-6, rtol=0)
    torch.testing.assert_close(found.state[0], state, atol=2e-6, rtol=0)
    own = weights.get("lm_head.weight")
    expected = hidden @ (rows.output.all().T if own is None else own.T)
    torch.testing.assert_close(head.logits(found.hidden, head.vocabulary)[0], expected, atol=1e-5, rtol=0)
    return head


def renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    for old, new in pairs:
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return tensors


def test_eagle_computes_its_formulas(tmp_path: Path, target: Path) -> None:
    head = compare(made.eagle(), tmp_path, target, made.eagle_forward)
    assert head.config.state_layers == (-1,)
    assert head.vocabulary.ids.tolist() == list(range(VOCABULARY))


def test_hass_in_vllms_form_computes_its_formulas(tmp_path: Path, target: Path) -> None:
    def reference(weights: Tensors, embeddings: torch.Tensor, states: torch.Tensor) -> Outputs:
        return made.eagle_forward(renamed(weights, ("model.layers", "layers")), embeddings, states)

    head = compare(made.hass(), tmp_path, target, reference)
    assert head.config.embed_norm and not head.config.input_norm and not head.config.output_norm


@pytest.mark.parametrize(("sampler", "two_outputs"), [(True, True), (True, False), (False, True)])
def test_fspad_and_its_ablations_compute_their_formulas(
    tmp_path: Path, target: Path, sampler: bool, two_outputs: bool
) -> None:
    checkpoint = made.fspad(sampler=sampler, two_outputs=two_outputs)
    head = compare(checkpoint, tmp_path, target, made.eagle_forward)
    assert (head.config.family, head.config.sampler, head.config.two_outputs) == ("fspad", sampler, two_outputs)


def test_the_older_speculators_eagle_computes_its_formulas(tmp_path: Path, target: Path) -> None:
    def with_norms(weights: Tensors, embeddings: torch.Tensor, states: torch.Tensor) -> Outputs:
        prefix = "transformer."
        embeddings = made.normed(embeddings, weights["embedding_layernorm.weight"])
        rows = torch.cat((embeddings, states), -1) @ weights["fusion_fc.weight"].T + weights["fusion_fc.bias"]
        inner = made.normed(rows, weights[f"{prefix}input_layernorm.weight"])
        rows = made.after_attention(rows + made.attended(inner, weights, f"{prefix}self_attn."), weights, prefix)
        hidden = made.normed(rows, weights["pre_lm_head_layernorm.weight"])
        return hidden, hidden

    def without(weights: Tensors, embeddings: torch.Tensor, states: torch.Tensor) -> Outputs:
        plain = renamed(weights, ("fusion_fc.", "fc."), ("transformer.", "layers.0."))
        return made.eagle_forward(plain, embeddings, states)

    compare(made.speculators_eagle(), tmp_path / "norms", target, with_norms)
    compare(made.speculators_eagle(layernorms=False), tmp_path / "plain", target, without)


def eagle3_reference(flags: dict[str, bool], prefix: str = "midlayer.") -> Callable[..., Outputs]:
    return lambda weights, embeddings, states: made.eagle3_forward(weights, embeddings, states, flags, prefix)


def test_eagle3_computes_its_formulas(tmp_path: Path, target: Path) -> None:
    head = compare(made.eagle3(), tmp_path, target, eagle3_reference({}))
    assert head.config.state_layers == (1, LAYERS // 2 - 1, LAYERS - 4)
    assert head.vocabulary.ids.tolist() == [6 * index + 3 for index in range(DRAFTED)]


def test_speculators_eagle3_computes_its_formulas(tmp_path: Path, target: Path) -> None:
    reference = eagle3_reference({"norm_before_residual": True}, "layers.0.")
    assert compare(made.speculators_eagle3(), tmp_path, target, reference).config.state_layers == (1, 3, 4)


def with_tensors(checkpoint: HeadCheckpoint, **sizes: tuple[int, ...]) -> HeadCheckpoint:
    checkpoint.tensors |= {name.replace("__", "."): numbers(*shape) for name, shape in sizes.items()}
    return checkpoint


BIASES = {
    "midlayer__self_attn__q_proj__bias": (64,),
    "midlayer__self_attn__k_proj__bias": (32,),
    "midlayer__self_attn__v_proj__bias": (32,),
}
NORMS = {f"fc_norm__{index}__weight": (HIDDEN,) for index in range(3)}


@pytest.mark.parametrize(
    ("flags", "tensors"),
    [
        ({"norm_before_residual": True}, {}),
        ({"norm_output": True}, {}),
        ({"norm_before_fc": True}, {"input_norm__weight": (3 * HIDDEN,)}),
        ({"fc_norm": True}, NORMS),
        ({"fc_norm": True, "norm_output": True}, NORMS),
        ({"qkv_bias": True}, BIASES),
        ({}, {"fc__bias": (HIDDEN,)}),
        ({}, {"midlayer__self_attn__o_proj__bias": (HIDDEN,)}),
    ],
    ids=lambda value: "-".join(value),
)
def test_each_flag_of_eagle3_changes_what_it_computes(
    tmp_path: Path, target: Path, flags: dict[str, bool], tensors: dict[str, tuple[int, ...]]
) -> None:
    plain = made.eagle3()
    head = load_head(plain.write(tmp_path / "plain"), target, dtype=torch.float64)
    flagged = with_tensors(HeadCheckpoint({**plain.config, **flags}, dict(plain.tensors)), **tensors)
    other = compare(flagged, tmp_path / "flagged", target, eagle3_reference(flags))
    tokens, states = torch.randint(0, VOCABULARY, (ROWS,)), torch.randn(ROWS, 3 * HIDDEN, dtype=torch.float64)
    before, after = run(head, tokens, states), run(other, tokens, states)
    assert (before.hidden - after.hidden).abs().max() + (before.state - after.state).abs().max() > 0.01


def test_more_than_one_layer(tmp_path: Path, target: Path) -> None:
    checkpoint = made.eagle3("layers.0.", num_hidden_layers=2)
    checkpoint.tensors |= made.decoder("layers.1.", HIDDEN) | {"layers.1.input_layernorm.weight": numbers(HIDDEN)}
    compare(checkpoint, tmp_path, target, eagle3_reference({}, "layers.0."))


def test_rotary_frequencies_follow_the_file(tmp_path: Path, target: Path) -> None:
    """EAGLE-1 counts with base 10000 where the file names none; any position can be computed, however few were trained."""
    unnamed = made.eagle()
    del unnamed.config["rope_theta"]
    tensors = {name: tensor.double() for name, tensor in unnamed.tensors.items()}
    head = load_head(unnamed.write(tmp_path / "a"), target, dtype=torch.float64)
    tokens, states = torch.randint(0, VOCABULARY, (ROWS,)), torch.randn(ROWS, HIDDEN, dtype=torch.float64)
    rows = torch.cat((head.embed(tokens), states), -1) @ tensors["fc.weight"].T + tensors["fc.bias"]
    rows = rows + made.attended(rows, tensors, "layers.0.self_attn.", theta=10_000.0)
    expected = made.after_attention(rows, tensors, "layers.0.")
    torch.testing.assert_close(run(head, tokens, states).hidden[0], expected, atol=2e-6, rtol=0)
    # Rotary attention sees distances alone.
    far = head(head.embed(tokens)[None], states[None], torch.arange(400, 400 + ROWS)[None], causal)
    torch.testing.assert_close(far.hidden[0], expected, atol=1e-4, rtol=0)
    scaled = made.eagle(rope_scaling={"type": "linear", "factor": 4.0})
    positions = torch.arange(ROWS)[None]
    linear = load_head(scaled.write(tmp_path / "b"), target, dtype=torch.float64)
    plain = load_head(HeadCheckpoint(made.eagle().config, scaled.tensors).write(tmp_path / "c"), target, dtype=torch.float64)
    embeddings = linear.embed(tokens)[None]
    torch.testing.assert_close(
        linear(embeddings, states[None], 4 * positions, causal).hidden,
        plain(embeddings, states[None], positions, causal).hidden,
    )


def test_layer_ids_of_both_conventions(tmp_path: Path, target: Path) -> None:
    def layers(name: str, training: dict[str, str] | None = None, **fields: Any) -> tuple[int, ...]:
        checkpoint = made.eagle3(**fields)
        checkpoint.training = dict(training or {})
        return load_head(checkpoint.write(tmp_path / name), target).config.state_layers

    ids = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    assert layers("a", **ids) == (1, 3, 4)
    assert layers("b", eagle_config=ids) == (1, 3, 4)
    assert layers("c", architectures=["LlamaForCausalLMEagle3"], eagle_config=ids) == (2, 4, 5)
    assert layers("d", eagle_aux_hidden_state_layer_ids=[1, 3, 4]) == (1, 3, 4)
    assert layers("e", {"layer_ids": "layers"}, **ids) == (2, 4, 5)
    assert layers("f", {"layer_ids": "hidden_states"}, eagle_aux_hidden_state_layer_ids=[1, 3, LAYERS]) == (0, 2, -1)


def test_missing_output_rows_are_the_targets(tmp_path: Path, target: Path) -> None:
    """Never random ones."""
    checkpoint = made.eagle3()
    del checkpoint.tensors["lm_head.weight"]
    head = load_head(checkpoint.write(tmp_path), target)
    torch.testing.assert_close(head.vocabulary.rows, read_target_rows(target).output.rows(head.vocabulary.ids))


def test_without_a_map_all_tokens_are_drafted(tmp_path: Path, target: Path) -> None:
    checkpoint = made.eagle3()
    checkpoint.config["draft_vocab_size"] = VOCABULARY
    checkpoint.tensors["lm_head.weight"] = numbers(VOCABULARY, HIDDEN)
    del checkpoint.tensors["d2t"], checkpoint.tensors["t2d"]
    assert load_head(checkpoint.write(tmp_path), target).vocabulary.ids.tolist() == list(range(VOCABULARY))


def test_vllms_token_map_and_the_targets_own_rows_are_shared(tmp_path: Path, target: Path) -> None:
    rows = read_target_rows(target)
    checkpoint = made.eagle(truncated_vocab_size=40)
    checkpoint.tensors |= {
        "token_map": torch.arange(40) * 2,
        "lm_head.weight": rows.output.all().to(torch.bfloat16),
        "embed_tokens.weight": rows.embedding.all().to(torch.bfloat16),
    }
    head = load_head(checkpoint.write(tmp_path), target)
    assert head.embed_tokens is None and head.lm_head is None
    torch.testing.assert_close(head.vocabulary.rows, rows.output.rows(torch.arange(40) * 2))
    extra = head.beyond([2, 3, 79, 80, 3])
    assert extra is not None and extra.ids.tolist() == [3, 79, 80]
    torch.testing.assert_close(extra.rows, rows.output.rows(extra.ids))
    assert head.beyond([2, 4]) is None


def test_trained_output_rows_take_no_others_beside_them(tmp_path: Path, target: Path) -> None:
    assert load_head(made.eagle3().write(tmp_path), target).beyond([0, 1, 2]) is None


@pytest.mark.parametrize("name", ["eagle", "hass", "fspad", "alignment", "eagle3"])
def test_a_saved_head_is_the_same_head(tmp_path: Path, target: Path, name: str) -> None:
    kinds = {
        "eagle": made.eagle,
        "hass": made.hass,
        "fspad": made.fspad,
        "alignment": lambda: made.fspad(sampler=False),
        "eagle3": made.eagle3,
    }
    head = load_head(kinds[name]().write(tmp_path / "from"), target)
    torch.nn.init.normal_(head.missing_state)
    training = {"tokenizer_sha256": tokenizer_digest(target), "steps": 3}
    save_head(head, tmp_path / "to", training, target_layers=LAYERS, dtype=torch.float32)
    again = load_head(tmp_path / "to", target)
    assert again.config == head.config
    assert again.vocabulary.ids.tolist() == head.vocabulary.ids.tolist()
    for key, tensor in head.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], tensor, atol=0, rtol=0)
    tokens, states = torch.randint(0, VOCABULARY, (ROWS,)), torch.randn(ROWS, head.config.state_size)
    torch.testing.assert_close(run(again, tokens, states).hidden, run(head, tokens, states).hidden, atol=0, rtol=0)
    assert json.loads((tmp_path / "to" / "training.json").read_text())["steps"] == 3


def test_weights_in_blocks_of_eight_bits(tmp_path: Path, target: Path) -> None:
    checkpoint = made.eagle()
    folder = checkpoint.write(tmp_path)
    (folder / "model.safetensors").unlink()
    save_blocks({name: each if each.dim() == 1 else quantized(each) for name, each in checkpoint.tensors.items()}, folder)
    head = load_head(folder, target)
    for name, tensor in head.state_dict().items():
        if name != "missing_state":
            torch.testing.assert_close(tensor, checkpoint.tensors[name.removeprefix("connector.")], atol=0.02, rtol=0)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25}},
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
            }
        },
    ],
    ids=["a part of the numbers is turned", "by kind of layer"],
)
def test_a_new_head_for_any_rope_of_a_target_can_be_read(target: Path, tmp_path: Path, rope: dict[str, Any]) -> None:
    shape = read_target_shape(target)
    config = head_for(replace(shape, config={**shape.config, **rope}), "eagle")
    assert dict(config.rope) == {"rope_type": "default", "rope_theta": 5e5}
    save_head(FeatureHead(config, read_target_rows(target)), tmp_path, {}, target_layers=shape.num_layers)
    assert load_head(tmp_path, target).config.rope == config.rope
