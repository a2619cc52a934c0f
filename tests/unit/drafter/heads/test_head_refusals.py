"""A head that cannot be served exactly as it was trained, or not for this target, is refused: field, value, what is allowed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.drafter.heads.files.head_files import load_head
from services.drafter.heads.files.kinds import inspect
from services.model_files.folder import tokenizer_digest
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.tiny_models import head_checkpoints as made
from tests.tiny_models.head_checkpoints import DRAFTED, HIDDEN, LAYERS, VOCABULARY, HeadCheckpoint, numbers, tensor
from tests.tiny_models.tiny import make_tiny_model
from training.convert_pickles import convert


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


def config(**fields: Any) -> Callable[[HeadCheckpoint], None]:
    return lambda checkpoint: checkpoint.config.update(fields)


def proposal(**fields: Any) -> Callable[[HeadCheckpoint], None]:
    return lambda checkpoint: checkpoint.config["speculators_config"]["proposal_methods"][0].update(fields)


@pytest.mark.parametrize(
    ("make", "change", "refusal"),
    [
        # Tensors.
        (
            made.eagle,
            tensor("layers.0.self_attn.z.weight", numbers(4, 4)),
            ("the tensor layers.0.self_attn.z.weight", "unknown"),
        ),
        (made.eagle, tensor("gate.weight", numbers(4, 4)), ("the tensor gate.weight", "unknown")),
        (made.eagle, tensor("layers.0.mlp.up_proj.weight", None), ("the tensor layers.0.mlp.up_proj.weight", "missing")),
        (made.fspad, tensor("fc.mlp.gate_proj.weight", None), ("the tensor fc.mlp.gate_proj.weight", "missing")),
        (made.eagle3, tensor("midlayer.hidden_norm.weight", None), ("the tensor midlayer.hidden_norm.weight", "missing")),
        (made.eagle3, tensor("norm.weight", None), ("the tensor norm.weight", "missing")),
        (
            made.eagle3,
            tensor("fc.weight", numbers(HIDDEN, 2 * HIDDEN)),
            ("the width of fc.weight", 128),
        ),
        (
            made.eagle,
            tensor("fc.weight", numbers(HIDDEN, 3 * HIDDEN)),
            ("the width of fc.weight", 192, "width of fc.weight is 192: must be 128"),
        ),
        (
            made.eagle,
            tensor("layers.0.mlp.up_proj.weight", numbers(95, 64)),
            ("the tensor layers.0.mlp.up_proj.weight", "[95, 64]"),
        ),
        (made.eagle, tensor("fc.bias", torch.ones(HIDDEN, dtype=torch.int8)), ("the tensor fc.bias", "torch.int8")),
        # The target.
        (made.eagle, config(hidden_size=32), ("hidden_size", 32, "must be 64, the target's")),
        (made.eagle, config(vocab_size=999), ("vocab_size", 999)),
        (made.eagle3, config(target_hidden_size=128), ("target_hidden_size", 128)),
        (made.eagle, lambda each: each.training.update(tokenizer_sha256="ab" * 32), ("changed", None, "is abababab")),
        (
            made.eagle3,
            config(eagle_aux_hidden_state_layer_ids=[2, 4, 9]),
            ("eagle_aux_hidden_state_layer_ids", "[2, 4, 9]"),
        ),
        (
            made.eagle3,
            config(eagle_aux_hidden_state_layer_ids=[2, 4]),
            ("the width of fc.weight", 192, "fc.weight is 192: must be 128, that of 2 states"),
        ),
        # Draft vocabulary.
        (made.eagle3, config(draft_vocab_size=50), ("draft_vocab_size", 50, "must be 48")),
        (
            made.eagle3,
            tensor("d2t", torch.full((DRAFTED,), VOCABULARY)),
            ("changed", None, "d2t leads to ids from 320 to 367: must be from 0 to 319"),
        ),
        (made.eagle3, tensor("d2t", -torch.arange(DRAFTED)), ("changed", None, "d2t leads to a token twice")),
        (made.eagle3, tensor("t2d", torch.ones(VOCABULARY, dtype=torch.bool)), ("changed", None, "t2d marks other tokens")),
        (made.eagle, config(draft_vocab_size=50), ("draft_vocab_size", 50, "must be 320")),
        # Flags that contradict the tensors.
        (made.eagle, config(bias=False), ("bias", "false")),
        (made.eagle, config(qkv_bias=True), ("qkv_bias", "true")),
        (made.eagle, config(attention_bias=True), ("attention_bias", "true")),
        (made.eagle3, config(norm_before_fc=True), ("norm_before_fc", "true")),
        (made.eagle3, config(fc_norm=True), ("fc_norm", "true")),
        (made.eagle3, tensor("input_norm.weight", numbers(3 * HIDDEN)), None),
        (made.eagle, config(num_hidden_layers=2), ("num_hidden_layers", 2)),
        (made.eagle3, config(norm_output="yes"), ("norm_output", "yes")),
        # Arithmetic that is not implemented.
        (made.eagle, config(hidden_act="mish"), ("hidden_act", "mish")),
        (made.eagle, config(model_type="gemma2"), ("model_type", "gemma2")),
        (made.eagle, config(is_causal=False), ("is_causal", "false")),
        (made.eagle, config(quantization_config={"bits": 4}), ("quantization_config.quant_method", "null")),
        (made.eagle, config(partial_rotary_factor=0.5), ("partial_rotary_factor", "0.5")),
        (made.eagle, config(rope_parameters={"partial_rotary_factor": 0.5}), ("partial_rotary_factor", "0.5")),
        (made.eagle, config(add_para_norm=True), ("add_para_norm", "true")),
        (made.eagle, config(logit_scale=0.5), ("logit_scale", "0.5")),
        (made.eagle3, config(hidden_size=32), ("hidden_size", 32, "must be 64, the target's, since it has no embed_tokens")),
        (made.eagle, tensor("fc.bias", torch.full((HIDDEN,), torch.nan)), ("the tensor fc.bias", "infinite values or NaN")),
        (made.eagle, config(rope_scaling={"rope_type": "longrope"}), ("rope_type", "longrope")),
        (
            made.eagle,
            config(rope_scaling={"type": "dynamic", "factor": 2.0}),
            ("max_position_embeddings", 128),
        ),
        (
            made.eagle,
            config(layer_types=["sliding_attention", "full_attention"]),
            ("layer_types", "['full_attention', 'sliding_attention']"),
        ),
        # What would change the target's answers.
        (made.speculators_eagle3, proposal(accept_tolerance=0.1), ("accept_tolerance", "0.1")),
        (made.speculators_eagle3, proposal(verifier_accept_k=2), ("verifier_accept_k", 2)),
        (made.speculators_eagle3, proposal(accept_lenience=1.5), ("accept_lenience", "1.5")),
        (made.speculators_eagle3, proposal(lenience=0.7), ("lenience", "0.7")),
        # Other drafters.
        (made.speculators_eagle3, config(speculators_model_type="dflash"), ("changed", None, "is a DFlash checkpoint")),
        (made.speculators_eagle3, config(speculators_model_type="dspark"), ("changed", None, "is a DSpark checkpoint")),
        (made.speculators_eagle3, config(speculators_model_type="peagle"), ("mask_token_id", None)),
        (made.eagle3, config(mask_token_id=5), ("the tensor mask_hidden", "missing")),
        (made.eagle, config(mask_token_id=5), ("changed", None, "is a P-EAGLE checkpoint")),
        (made.eagle, config(dflash_config={"mask_token_id": 3}), ("changed", None, "is a DFlash checkpoint")),
        (made.eagle, config(medusa_num_heads=3), ("changed", None, "is a Medusa checkpoint")),
        (made.eagle, lambda each: each.tensors.pop("fc.weight"), ("changed", None, "is a language model")),
    ],
)
def test_heads_are_refused_by_name(
    tmp_path: Path,
    target: Path,
    make: Callable[[], HeadCheckpoint],
    change: Callable[[HeadCheckpoint], object],
    refusal: tuple[object, ...] | None,
) -> None:
    checkpoint = make()
    load_head(checkpoint.write(tmp_path / "whole"), target)
    change(checkpoint)
    checkpoint.write(tmp_path / "changed")
    if refusal is None:
        assert load_head(tmp_path / "changed", target).config.norm_before_fc
        return
    with refuses(ConfigurationError, *refusal) as refused:
        load_head(tmp_path / "changed", target)
    assert "\n" not in str(refused.value)


def test_medusa_is_known_by_its_tensors(tmp_path: Path, target: Path) -> None:
    checkpoint = HeadCheckpoint({}, {"0.0.linear.weight": numbers(4, 4), "0.1.weight": numbers(4, 4)})
    with refuses(ConfigurationError, says="is a Medusa checkpoint"):
        load_head(checkpoint.write(tmp_path), target)
    with refuses(ConfigurationError, field="b"):
        load_head(HeadCheckpoint({}, {"a.weight": numbers(4, 4)}).write(tmp_path / "b"), target)


def test_lilicorr_is_refused_by_name(tmp_path: Path, target: Path) -> None:
    tensors = {name: numbers(8, 8) for name in ("fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_proj.weight")}
    fields = {"architectures": ["LiLiCorrDraftModel"], "block_size": 4, "dflash_config": {"lilicorr_candidate_topk": 4}}
    with refuses(ConfigurationError, says="is a LiLiCorr checkpoint: its head, which scores pairs of candidates"):
        inspect(HeadCheckpoint(fields, tensors).write(tmp_path), target)


def test_dynamic_rope_is_served_within_the_heads_own_context(tmp_path: Path, target: Path) -> None:
    checkpoint = made.eagle(rope_scaling={"type": "dynamic", "factor": 2.0})
    checkpoint.config["max_position_embeddings"] = 512
    head = load_head(checkpoint.write(tmp_path / "dynamic"), target)
    plain = load_head(made.eagle().write(tmp_path / "plain"), target)
    assert head.config.rope["rope_type"] == "dynamic"
    positions = torch.arange(512)[None]
    turned = [each._rotary.factors(positions, torch.float32) for each in (head, plain)]
    assert all(map(torch.equal, *turned))


def test_a_damaged_file_is_one_line(tmp_path: Path, target: Path) -> None:
    folder = made.eagle().write(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with refuses(ConfigurationError, says="incomplete") as refused:
        load_head(folder, target)
    assert "\n" not in str(refused.value)
    (folder / "config.json").write_text("{")
    with refuses(ConfigurationError, field="config.json"):
        load_head(folder, target)


def pickled(folder: Path) -> HeadCheckpoint:
    """A checkpoint as EAGLE's authors publish it."""
    checkpoint = made.eagle()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    torch.save(checkpoint.tensors, folder / "pytorch_model.bin")
    return checkpoint


def test_pickled_weights_are_not_opened_when_serving(tmp_path: Path, target: Path) -> None:
    pickled(tmp_path / "head")
    with refuses(ConfigurationError, field="pytorch_model.bin", value="pickled"):
        load_head(tmp_path / "head", target)


@pytest.mark.parametrize("beside", [True, False])
def test_pickled_weights_are_converted(tmp_path: Path, target: Path, beside: bool) -> None:
    folder = tmp_path / "head"
    checkpoint = pickled(folder)
    out = folder if beside else tmp_path / "out"
    assert convert(folder, None if beside else out, target=target, layer_ids="layers") == out
    for name, value in load_file(out / "model.safetensors").items():
        torch.testing.assert_close(value, checkpoint.tensors[name], atol=0, rtol=0)
    training = json.loads((out / "training.json").read_text())
    assert training["tokenizer_sha256"] == tokenizer_digest(target)
    assert training["layer_ids"] == "layers" and set(training["converted_from"]) == {"pytorch_model.bin"}
    load_head(out, target)
    with refuses(ConfigurationError, field="head"):
        convert(folder, out)


def test_converting_deletes_nothing_that_was_there(tmp_path: Path, target: Path) -> None:
    folder, link, other = tmp_path / "head", tmp_path / "link", tmp_path / "other"
    pickled(folder)
    link.symlink_to(folder)
    other.mkdir()
    (other / "config.json").write_text("{}")
    with refuses(ConfigurationError, field="head"):
        convert(folder, other)
    assert (other / "config.json").read_text() == "{}"
    # Another name of the same folder.
    assert convert(link, folder, target=target) == link
    assert (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


@pytest.mark.parametrize("beside", [True, False])
def test_pickled_draft_models_are_converted(tmp_path: Path, target: Path, beside: bool) -> None:
    folder, out = tmp_path / "model", tmp_path / "model" if beside else tmp_path / "out"
    shutil.copytree(target, folder)
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert convert(folder, out, target=target) == out
    assert "tokenizer_sha256" not in json.loads((out / "training.json").read_text())
    assert inspect(out, target).source == "draft_model"
    assert (out / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    assert all(torch.equal(value, tensors[name]) for name, value in load_file(out / "model.safetensors").items())


class _Program:
    """Runs when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("kind", ["program", "number", "list", "raw", "nothing", "foreign"])
def test_convert_refuses_anything_but_tensors(tmp_path: Path, target: Path, kind: str) -> None:
    folder, ran = tmp_path / "head", tmp_path / "ran"
    tensors: dict[str, Any] = dict(pickled(folder).tensors)
    file = folder / "pytorch_model.bin"
    if kind == "program":
        torch.save({**tensors, "x": _Program(ran)}, file)
    elif kind == "raw":
        file.write_bytes(pickle.dumps(_Program(ran)))
    elif kind == "number":
        torch.save({**tensors, "x": 3}, file)
    elif kind == "list":
        torch.save(list(tensors.values()), file)
    elif kind == "nothing":
        file.unlink()
    else:
        del tensors["fc.weight"]
        torch.save(tensors, file)
    before = sorted(each.name for each in folder.iterdir())
    field, says = {
        "program": (file, "more than tensors"),
        "raw": (file, "more than tensors"),
        "number": (file, "x is int"),
        "list": (file, "it holds list"),
        "nothing": (folder, "no pickled weights"),
        "foreign": (folder, "is a language model"),
    }[kind]
    with refuses(ConfigurationError, field, says=says) as refused:
        convert(folder, target=target)
    assert not ran.exists()
    assert "\n" not in str(refused.value)
    assert sorted(each.name for each in folder.iterdir()) == before
