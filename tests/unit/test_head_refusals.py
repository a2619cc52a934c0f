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
from tests import head_checkpoints as made
from tests.head_checkpoints import DRAFTED, HIDDEN, LAYERS, VOCABULARY, HeadCheckpoint, numbers
from tests.refusals import refuses
from tests.tiny import make_tiny_model
from training.convert_pickles import convert


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


def config(**fields: Any) -> Callable[[HeadCheckpoint], None]:
    return lambda checkpoint: checkpoint.config.update(fields)


def tensor(name: str, value: torch.Tensor | None) -> Callable[[HeadCheckpoint], None]:
    def change(checkpoint: HeadCheckpoint) -> None:
        if value is None:
            del checkpoint.tensors[name]
        else:
            checkpoint.tensors[name] = value

    return change


def proposal(**fields: Any) -> Callable[[HeadCheckpoint], None]:
    return lambda checkpoint: checkpoint.config["speculators_config"]["proposal_methods"][0].update(fields)


@pytest.mark.parametrize(
    ("make", "change", "words"),
    [
        # Tensors.
        (
            made.eagle,
            tensor("layers.0.self_attn.z.weight", numbers(4, 4)),
            r"tensor layers\.0\.self_attn\.z\.weight is unknown",
        ),
        (made.eagle, tensor("gate.weight", numbers(4, 4)), r"tensor gate\.weight is unknown: must be one of layout eagle"),
        (made.eagle, tensor("layers.0.mlp.up_proj.weight", None), r"layers\.0\.mlp\.up_proj\.weight is missing"),
        (made.fspad, tensor("fc.mlp.gate_proj.weight", None), r"fc\.mlp\.gate_proj\.weight is missing"),
        (made.eagle3, tensor("midlayer.hidden_norm.weight", None), r"midlayer\.hidden_norm\.weight is missing"),
        (made.eagle3, tensor("norm.weight", None), r"tensor norm\.weight is missing"),
        (
            made.eagle3,
            tensor("fc.weight", numbers(HIDDEN, 2 * HIDDEN)),
            r"width of fc\.weight is 128: must be 192, that of 3 st",
        ),
        (made.eagle, tensor("fc.weight", numbers(HIDDEN, 3 * HIDDEN)), r"width of fc\.weight is 192: must be 128"),
        (
            made.eagle,
            tensor("layers.0.mlp.up_proj.weight", numbers(95, 64)),
            r"up_proj\.weight is \[95, 64\]: must be \[96, 64\]",
        ),
        (made.eagle, tensor("fc.bias", torch.ones(HIDDEN, dtype=torch.int8)), "int8: must be floating-point"),
        # The target.
        (made.eagle, config(hidden_size=32), "hidden_size is 32: must be 64, the target's"),
        (made.eagle, config(vocab_size=999), "vocab_size is 999: must be 320, the target's"),
        (made.eagle3, config(target_hidden_size=128), "target_hidden_size is 128: must be 64"),
        (made.eagle, lambda each: each.training.update(tokenizer_sha256="ab" * 32), r"tokenizer_sha256 .* is abababab"),
        (
            made.eagle3,
            config(eagle_aux_hidden_state_layer_ids=[2, 4, 9]),
            r"layer_ids is \[2, 4, 9\]: must be layers .* 0 to 8",
        ),
        (made.eagle3, config(eagle_aux_hidden_state_layer_ids=[2, 4]), "fc.weight is 192: must be 128, that of 2 states"),
        # Draft vocabulary.
        (made.eagle3, config(draft_vocab_size=50), "draft_vocab_size is 50: must be 48"),
        (
            made.eagle3,
            tensor("d2t", torch.full((DRAFTED,), VOCABULARY)),
            "d2t leads to ids from 320 to 367: must be from 0 to 319",
        ),
        (made.eagle3, tensor("d2t", -torch.arange(DRAFTED)), "d2t leads to a token twice"),
        (made.eagle3, tensor("t2d", torch.ones(VOCABULARY, dtype=torch.bool)), "t2d marks other tokens"),
        (made.eagle, config(draft_vocab_size=50), "draft_vocab_size is 50: must be 320"),
        # Flags that contradict the tensors.
        (made.eagle, config(bias=False), r"bias is false: must be true: fc\.bias is among"),
        (made.eagle, config(qkv_bias=True), "qkv_bias is true: must be false"),
        (made.eagle, config(attention_bias=True), "attention_bias is true: must be false"),
        (made.eagle3, config(norm_before_fc=True), "norm_before_fc is true: must be false"),
        (made.eagle3, config(fc_norm=True), "fc_norm is true: must be false"),
        (made.eagle3, tensor("input_norm.weight", numbers(3 * HIDDEN)), None),
        (made.eagle, config(num_hidden_layers=2), "num_hidden_layers is 2: must be 1"),
        (made.eagle3, config(norm_output="yes"), "norm_output is yes: must be true or false"),
        # Arithmetic that is not implemented.
        (made.eagle, config(hidden_act="mish"), "hidden_act is mish: must be one of silu"),
        (made.eagle, config(model_type="gemma2"), "model_type is gemma2: must be one of llama"),
        (made.eagle, config(is_causal=False), "is_causal is False: must be True"),
        (made.eagle, config(quantization_config={"bits": 4}), "quantization_config is .*: must be None"),
        (made.eagle, config(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5: must be 1"),
        (made.eagle, config(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor is 0.5: must be 1"),
        (made.eagle, config(add_para_norm=True), r"add_para_norm is true: must be false: embed_norm\.weight is not among"),
        (made.eagle, config(logit_scale=0.5), "logit_scale is 0.5: must be 1.0, the target's, whose output layer it shares"),
        (made.eagle3, config(hidden_size=32), r"hidden_size is 32: must be 64, the target's, since it has no embed_tokens"),
        (made.eagle, tensor("fc.bias", torch.full((HIDDEN,), torch.nan)), r"fc\.bias holds infinite values or NaN"),
        (made.eagle, config(rope_scaling={"rope_type": "longrope"}), "rope_type is longrope: must be one of default"),
        (
            made.eagle,
            config(rope_scaling={"type": "dynamic", "factor": 2.0}),
            "max_position_embeddings is 128: must be at least 512",
        ),
        (made.eagle, config(layer_types=["sliding_attention", "full_attention"]), "layer_types is"),
        # What would change the target's answers.
        (made.speculators_eagle3, proposal(accept_tolerance=0.1), "accept_tolerance is 0.1: must be 0"),
        (made.speculators_eagle3, proposal(verifier_accept_k=2), "verifier_accept_k is 2: must be 1"),
        (made.speculators_eagle3, proposal(accept_lenience=1.5), "accept_lenience is 1.5: must be 1"),
        (made.speculators_eagle3, proposal(lenience=0.7), "lenience is 0.7: must be 1"),
        # Other drafters.
        (made.speculators_eagle3, config(speculators_model_type="dflash"), "is a DFlash checkpoint: .* not supported yet"),
        (made.speculators_eagle3, config(speculators_model_type="dspark"), "is a DSpark checkpoint"),
        (made.speculators_eagle3, config(speculators_model_type="peagle"), "is a P-EAGLE checkpoint"),
        (made.eagle3, config(mask_token_id=5), "is a P-EAGLE checkpoint"),
        (made.eagle, config(dflash_config={"mask_token_id": 3}), "is a DFlash checkpoint"),
        (made.eagle, config(medusa_num_heads=3), "is a Medusa checkpoint"),
        (made.eagle, lambda each: each.tensors.pop("fc.weight"), "is a language model"),
    ],
)
def test_heads_are_refused_by_name(
    tmp_path: Path,
    target: Path,
    make: Callable[[], HeadCheckpoint],
    change: Callable[[HeadCheckpoint], object],
    words: str | None,
) -> None:
    checkpoint = make()
    load_head(checkpoint.write(tmp_path / "whole"), target)
    change(checkpoint)
    checkpoint.write(tmp_path / "changed")
    if words is None:
        assert load_head(tmp_path / "changed", target).config.norm_before_fc
        return
    with pytest.raises(ConfigurationError, match=words) as refused:
        load_head(tmp_path / "changed", target)
    assert "\n" not in str(refused.value)


def test_medusa_is_known_by_its_tensors(tmp_path: Path, target: Path) -> None:
    checkpoint = HeadCheckpoint({}, {"0.0.linear.weight": numbers(4, 4), "0.1.weight": numbers(4, 4)})
    with refuses(ConfigurationError, says="is a Medusa checkpoint"):
        load_head(checkpoint.write(tmp_path), target)
    with refuses(ConfigurationError, field="b"):
        load_head(HeadCheckpoint({}, {"a.weight": numbers(4, 4)}).write(tmp_path / "b"), target)


def test_dynamic_rope_is_served_within_the_heads_own_context(tmp_path: Path, target: Path) -> None:
    checkpoint = made.eagle(rope_scaling={"type": "dynamic", "factor": 2.0})
    checkpoint.config["max_position_embeddings"] = 512
    load_head(checkpoint.write(tmp_path), target)


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
