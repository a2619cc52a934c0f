"""Assistants that cannot draft for a target are refused before anything is served: which field or tensor, and what is allowed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.drafter.heads.assistant.files import load_assistant
from services.drafter.heads.files.kinds import inspect
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.tiny_models.assistants import Pair, edit, make_pair
from tests.tiny_models.head_checkpoints import HeadCheckpoint, numbers
from tests.tiny_models.tiny import make_tiny_model

CENTROIDS, ORDERING = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"
QUERY = "model.layers.1.self_attn.q_proj.weight"
Change = Callable[[Pair], None]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_pair(tmp_path, "shared", ordered=True)


def tensor(name: str, value: torch.Tensor | None) -> Change:
    return edit(**{name.replace(".", "__"): value})


def config(**fields: object) -> Change:
    """Of config.json; those of its text_config with ``text_`` before them."""
    return edit({f"text.{name[5:]}" if name.startswith("text_") else name: value for name, value in fields.items()})


def rope(**fields: object) -> Change:
    return config(text_rope_parameters={"full_attention": {"rope_theta": 1e6, "rope_type": "proportional", **fields}})


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (tensor("pre_projection.weight", None), ("the tensor pre_projection.weight", "missing")),
        (tensor("post_projection.weight", None), ("the tensor post_projection.weight", "missing")),
        (tensor("model.norm.weight", None), ("the tensor model.norm.weight", "missing")),
        (tensor("model.embed_tokens.weight", None), ("the tensor model.embed_tokens.weight", "missing")),
        (tensor(QUERY, None), (f"the tensor {QUERY}", "missing")),
        (tensor("model.layers.3.layer_scalar", None), ("the tensor model.layers.3.layer_scalar", "missing")),
        (tensor(ORDERING, None), (f"the tensor {ORDERING}", "missing")),
        (tensor("model.layers.0.z.weight", numbers(4, 4)), ("the tensor model.layers.0.z.weight", "unknown")),
        (tensor("lm_head.bias", numbers(4)), ("the tensor lm_head.bias", "unknown")),
        (tensor("pre_projection.weight", numbers(32, 64)), ("the tensor pre_projection.weight", [32, 64])),
        # The width of sliding attention, where the target's keys are wider.
        (
            tensor("model.layers.3.self_attn.q_norm.weight", numbers(16)),
            ("the tensor model.layers.3.self_attn.q_norm.weight", [16]),
        ),
        (tensor("lm_head.weight", numbers(300, 32)), ("the tensor lm_head.weight", [300, 32])),
        (config(backbone_hidden_size=128), ("backbone_hidden_size", 128)),
        (config(text_vocab_size=999), ("vocab_size", 999)),
        (config(text_num_hidden_layers=3), ("num_hidden_layers", 3)),
        (config(text_layer_types=["full_attention"]), ("layer_types", "['full_attention']")),
        (config(text_layer_types=["chunked_attention"] * 4), ("layer_types",)),
        (config(text_num_kv_shared_layers=2), ("num_kv_shared_layers", 2)),
        (config(text_num_attention_heads=3), ("num_attention_heads", 3)),
        (config(text_hidden_activation="sine"), ("hidden_activation", "sine")),
        (config(text_use_bidirectional_attention="all"), ("use_bidirectional_attention", "all")),
        (config(accept_lenience=1.5), ("accept_lenience", "1.5")),
        (rope(rope_type="yarn"), ("rope_parameters of full_attention", "yarn")),
        (rope(rope_theta=-1), ("rope_theta in rope_parameters of full_attention", -1)),
        # What the clusters are, must be said by field and tensors alike.
        (config(use_ordered_embeddings=False), ("use_ordered_embeddings", "false")),
        (tensor(CENTROIDS, None), ("use_ordered_embeddings", "true")),
        (config(num_centroids=32), ("num_centroids", 32)),
        (edit({"num_centroids": 15}, masked_embedding__centroids__weight=numbers(15, 32)), ("num_centroids", 15)),
        (config(centroid_intermediate_top_k=17), ("centroid_intermediate_top_k", 17)),
        (tensor(ORDERING, torch.arange(300)), (f"the tensor {ORDERING}", [300])),
    ],
)
def test_they_are_refused_by_name(pair: Pair, change: Change, refusal: tuple[object, ...]) -> None:
    inspect(pair.folder, pair.target)
    change(pair)
    for refused in (inspect, load_assistant):
        with refuses(ConfigurationError, *refusal) as caught:
            refused(pair.folder, pair.target)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (tensor(ORDERING, torch.zeros(320, dtype=torch.int64)), ORDERING),
        (tensor(ORDERING, torch.arange(320) + 1), ORDERING),
        (tensor(ORDERING, torch.arange(320.0)), ORDERING),
        (tensor(QUERY, torch.full((64, 32), torch.nan)), QUERY),
    ],
)
def test_numbers_that_make_no_sense_are_refused(pair: Pair, change: Change, name: str) -> None:
    change(pair)
    with refuses(ConfigurationError, f"the tensor {name}"):
        load_assistant(pair.folder, pair.target)


def test_another_target_is_refused(pair: Pair, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other")
    with refuses(ConfigurationError, "the target's model_type", "llama"):
        inspect(pair.folder, other)


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        # Of which no layer makes keys of its own.
        ({"layer_types": ["full_attention"] * 6}, ("the target's layer_types",)),
        # Whose layer reads the embeddings.
        ({"num_kv_shared_layers": 5}, ("the target's layer that makes the keys of sliding_attention", 0)),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "llama3"}}},
            ("the target's rope_parameters of sliding_attention", "llama3"),
        ),
    ],
)
def test_a_target_whose_keys_drafters_cannot_make_is_refused(
    pair: Pair, fields: dict[str, object], refusal: tuple[object, ...]
) -> None:
    file = pair.target / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    with refuses(ConfigurationError, *refusal):
        inspect(pair.folder, pair.target)


@pytest.mark.parametrize(
    ("name", "value", "refusal"),
    [
        ("k_proj.weight", None, ("layers.2.self_attn.k_proj.weight", "missing")),
        ("k_proj.bias", numbers(32), ("the target's model.layers.2.self_attn.k_proj.bias", "there")),
    ],
)
def test_a_target_with_other_weights_is_refused(
    pair: Pair, name: str, value: torch.Tensor | None, refusal: tuple[object, ...]
) -> None:
    file = pair.target / "model.safetensors"
    held: dict[str, torch.Tensor | None] = {**load_file(file), f"model.layers.2.self_attn.{name}": value}
    save_file({name: each for name, each in held.items() if each is not None}, file)
    with refuses(ConfigurationError, *refusal):
        inspect(pair.folder, pair.target)


def test_one_that_says_so_and_is_none_is_refused(pair: Pair, tmp_path: Path) -> None:
    fields = json.loads((pair.folder / "config.json").read_text())
    folder = HeadCheckpoint(fields, {"model.embed_tokens.weight": numbers(320, 32)}).write(tmp_path / "none")
    with refuses(ConfigurationError, "num_hidden_layers", 4):
        inspect(folder, pair.target)
