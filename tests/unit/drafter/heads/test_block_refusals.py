"""Block drafters that are not served: each field and tensor that says something else is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.drafter.heads.blocks.files import load_blocks
from services.drafter.heads.files.kinds import inspect
from speculation import limits
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.tiny_models import block_checkpoints as made
from tests.tiny_models.block_checkpoints import DEPTH, KERNEL, RANK, STATE
from tests.tiny_models.head_checkpoints import HIDDEN, LAYERS, VOCABULARY, HeadCheckpoint, numbers, tensor
from tests.tiny_models.tiny import make_tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


def config(**fields: Any) -> Callable[[HeadCheckpoint], object]:
    return lambda checkpoint: checkpoint.config.update(fields)


def nested(**fields: Any) -> Callable[[HeadCheckpoint], object]:
    return lambda checkpoint: checkpoint.config["dflash_config"].update(fields)


@pytest.mark.parametrize(
    ("make_it", "change", "field"),
    [
        (made.dflash, config(block_size=limits.MAX_TREE_NODES + 1), "block_size"),
        (made.dflash, config(block_size=1), "block_size"),
        (made.dflash, config(num_hidden_layers=3), "num_hidden_layers"),
        (made.dflash, config(num_target_layers=36), "num_target_layers"),
        (made.dflash, config(vocab_size=999), "vocab_size"),
        (made.dflash, config(hidden_size=32), "hidden_size"),
        (made.dflash, config(eagle_aux_hidden_state_layer_ids=[1, 3, 6]), "eagle_aux_hidden_state_layer_ids"),
        (made.dflash, config(layer_types=["full_attention"]), "layer_types"),
        (made.dflash, config(layer_types=["sliding_attention"] * DEPTH), "sliding_window"),
        (made.dflash, config(rope_scaling={"rope_type": "longrope"}), "rope_type"),
        (made.dflash, config(rope_parameters={"full_attention": {"rope_theta": 1e6}}), "rope_parameters"),
        (made.dflash, config(num_key_value_heads=3), "num_key_value_heads"),
        (made.dflash, config(is_neox_style=False), "is_neox_style"),
        (made.dflash, nested(mask_token_id=VOCABULARY), "mask_token_id"),
        (made.dflash, nested(mask_token_id=None), "mask_token_id"),
        (made.dflash, nested(target_layer_ids=[1, 3, LAYERS]), "target_layer_ids"),
        (made.dflash, nested(target_layer_ids=[-1, 3, 6]), "target_layer_ids"),
        (made.dflash, nested(target_layer_ids=None), "target_layer_ids"),
        (made.dflash, nested(target_layer_ids=[1, 3]), "the width of fc.weight"),
        (made.dflash, nested(draft_shift=True), "draft_shift"),
        (made.dflash, nested(use_swa=True), "use_swa"),
        (made.dflash, nested(attention_mode="mla"), "attention_mode"),
        (made.dflash, nested(selector_rank=256), "selector_rank"),
        (made.dflash, nested(conv_kernel_size=2), "conv_kernel_size"),
        (made.dflash, config(architectures=["DFlash2DraftModel"]), "the tensor candidate_selector.hidden_projection.weight"),
        (made.dflash, nested(output_multiplier="x"), "output_multiplier"),
        (made.speculators_dflash, config(projector_type="domino"), "gru_hidden_dim"),
        (made.speculators_dflash, config(projector_type="else"), "projector_type"),
        (made.speculators_dflash, config(shift_label="x"), "shift_label"),
        (made.speculators_dflash, config(aux_hidden_state_layer_ids=[0, 3, 6]), "aux_hidden_state_layer_ids"),
        (made.speculators_dflash, config(draft_vocab_size=50), "draft_vocab_size"),
        (made.dflash, tensor("layers.1.mlp.up_proj.weight", None), "the tensor layers.1.mlp.up_proj.weight"),
        (made.dflash, tensor("mask_embedding", numbers(4, 4)), "the tensor mask_embedding"),
        (made.dflash, tensor("norm.weight", numbers(4)), "the tensor norm.weight"),
        (made.domino, nested(gru_hidden_dim=STATE + 1), "gru_hidden_dim"),
        (made.domino, nested(emb_dim=RANK + 1), "emb_dim"),
        (made.domino, nested(pure_draft_prefix_len=-1), "pure_draft_prefix_len"),
        (made.domino, tensor("embed_proj.2.weight", None), "the tensor embed_proj.2.weight"),
        (made.dflash2, nested(selector_rank=RANK + 1), "selector_rank"),
        (made.dflash2, nested(selector_top_k=None), "selector_top_k"),
        (made.dflash2, nested(conv_kernel_size=KERNEL + 1), "conv_kernel_size"),
        (made.dflash2, nested(conv_group_size=7), "conv_group_size"),
        (made.dflash2, nested(conv_group_size=32), "the tensor layers.0.attention_conv.kernel_projection.weight"),
        (made.dflash2, nested(draft_vocab_size=48), "draft_vocab_size"),
        (made.dflash2, tensor("layers.1.mlp_conv.base_kernel", None), "the tensor layers.1.mlp_conv.base_kernel"),
        (
            made.dflash2,
            tensor("layers.1.attention_conv.base_kernel", numbers(2, KERNEL, HIDDEN + 1)),
            "the tensor layers.1.attention_conv.base_kernel",
        ),
        (made.dspark, config(markov_rank=8), "markov_rank"),
        (made.dspark, config(markov_head_type="rnn"), "markov_head_type"),
        (made.dspark, config(enable_confidence_head=False), "enable_confidence_head"),
        (made.dspark, config(confidence_head_with_markov=False), "the tensor confidence_head.proj.weight"),
        (made.dspark, config(target_layer_ids=[-1, 3, 6]), "target_layer_ids"),
        (made.dspark, tensor("markov_head.markov_w2.weight", numbers(4, RANK)), "the tensor markov_head.markov_w2.weight"),
        (made.dspark, tensor("markov_head.gate_proj.weight", numbers(RANK, RANK + HIDDEN)), "markov_head_type"),
        (made.dspark, tensor("confidence_head.proj.bias", None), "the tensor confidence_head.proj.bias"),
    ],
)
def test_what_it_cannot_serve_is_refused_by_name(
    tmp_path: Path,
    target: Path,
    make_it: Callable[[], HeadCheckpoint],
    change: Callable[[HeadCheckpoint], object],
    field: str,
) -> None:
    checkpoint = make_it()
    change(checkpoint)
    folder = checkpoint.write(tmp_path)
    for read in (load_blocks, inspect):
        with refuses(ConfigurationError, field=field):
            read(folder, target)


def test_numbers_that_are_none_are_refused(tmp_path: Path, target: Path) -> None:
    checkpoint = made.dflash()
    checkpoint.tensors["fc.weight"][0, 0] = torch.nan
    with refuses(ConfigurationError, field="the tensor fc.weight"):
        load_blocks(checkpoint.write(tmp_path), target)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("speculators mlp", {"speculators_model_type": "mlp"}),
        ("speculators independent", {"speculators_model_type": "independent"}),
    ],
)
def test_other_kinds_are_named(tmp_path: Path, target: Path, kind: str, fields: dict[str, object]) -> None:
    folder = made.dflash(**fields).write(tmp_path)
    for read in (load_blocks, inspect):
        with refuses(ConfigurationError, says=f"is a {kind} checkpoint"):
            read(folder, target)


def test_other_tensors_are_not_loaded_as_blocks(tmp_path: Path, target: Path) -> None:
    folder = HeadCheckpoint({"hidden_size": HIDDEN}, {"fc.weight": numbers(HIDDEN, HIDDEN)}).write(tmp_path)
    with refuses(ConfigurationError, says="as dflash"):
        load_blocks(folder, target)
