"""Models that cannot be served are refused by name, with the same sentence before a start and at it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

from cluster.checks.preflight import preflight
from cluster.models.target import resolve
from cluster.settings.config import load
from services.model_files import gguf_header
from services.model_files.folder import one_line, reading
from services.model_files.known_types import known_gguf_architectures, known_types
from services.verifier.config import TargetConfig
from services.verifier.kernels.native.library import library
from services.verifier.loading import refusals
from services.verifier.loading.load_model import load_layers, load_whole
from services.verifier.model.target import TransformersTarget
from speculation.errors import ConfigurationError, Unavailable
from tests.running.refusals import refuses
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.tiny_gguf import make_tiny_gguf

Weights = dict[str, torch.Tensor]


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def configure(model: Path, **more: object) -> None:
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(content | more))


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        action()
    told = str(caught.value)
    assert "\n" not in told
    assert len(told) < 600
    return told


def plan(model: Path, tmp_path: Path) -> None:
    preflight(load(flags=[f"model={model}", "server.port=0", f"cache_dir={tmp_path / 'cache'}"], environ={}))


def config_of(model: Path, **settings: Any) -> TargetConfig:
    return TargetConfig(**{"model_path": str(model), "kv_cache_tokens": 512, "kernels": "torch", **settings})


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"model_type": "t5"}, ("model_type", "t5")),
        ({"model_type": "bart"}, ("model_type", "bart")),
        ({"model_type": "whisper"}, ("model_type", "whisper")),
        ({"is_encoder_decoder": True}, ("model_type", "llama", "llama is an encoder-decoder")),
        ({"model_type": "llava"}, ("model_type", "llava")),
        ({"model_type": "qwen2_vl"}, ("model_type", "qwen2_vl")),
        ({"model_type": "musicgen"}, ("model_type", "musicgen")),
        ({"model_type": "xlstm"}, ("model_type", "xlstm")),
        ({"model_type": "qwen4_exp_text"}, ("model_type", "qwen4_exp_text")),
        ({"recurrent_kv_cache_mode": "last_loop"}, ("recurrent_kv_cache_mode", "last_loop")),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            ("model_type", "llama", "llama has layers of the type linear_attention"),
        ),
        ({"layer_types": ["full_attention", "odd"]}, ("layer_types", "odd")),
        ({"layer_types": 3}, ("layer_types", 3)),
        ({"model_type": "bert"}, ("is_decoder", "false")),
        ({"model_type": "distilbert"}, ("model_type", "distilbert")),
        ({"model_type": "vit"}, ("model_type", "vit")),
        ({"model_type": "foo"}, ("model_type", "foo", "does not know; a newer")),
        (
            {"model_type": "foo", "auto_map": {"AutoConfig": "x.Y"}},
            ("model_type", "foo", "code that comes with a checkpoint (auto_map) is never run"),
        ),
        ({"model_type": 7}, ("model_type", 7)),
        ({"rope_scaling": {"rope_type": "longrope"}}, ("rope_scaling", "{'rope_type': 'longrope'}")),
        ({"rope_parameters": 1}, ("rope_parameters", 1)),
        ({"hidden_size": 0}, ("hidden_size", 0)),
        ({"hidden_size": False}, ("hidden_size", False, "hidden_size is false in config.json")),
        ({"vocab_size": -1}, ("vocab_size", -1)),
        ({"num_attention_heads": "4"}, ("num_attention_heads", 4, "num_attention_heads is '4' in config.json")),
        (
            {"num_key_value_heads": 3},
            (
                "num_attention_heads",
                4,
                "num_attention_heads is 4 in config.json: must be a multiple of num_key_value_heads, 3",
            ),
        ),
        ({"dtype": "float8_e4m3fn"}, ("dtype", "float8_e4m3fn")),
        ({"num_hidden_layers": 3}, ("model",)),
        ({"sliding_window": "x"}, ("sliding_window", "x")),
        ({"transformers_weights": "other.safetensors"}, ("transformers_weights", "other.safetensors")),
        ({"text_config": "x"}, ("text_config", "x")),
    ],
)
def test_configurations(changes: dict[str, object], refused: tuple[object, ...], model: Path, tmp_path: Path) -> None:
    configure(model, **changes)
    with refuses(ConfigurationError, *refused):
        plan(model, tmp_path)
    assert refusal(lambda: plan(model, tmp_path)) == refusal(lambda: TransformersTarget(config_of(model)))


@pytest.mark.parametrize("method", ["quanto", "modelopt", 3, None])
def test_formats_that_are_not_read(method: object, model: Path, tmp_path: Path) -> None:
    configure(model, quantization_config={"quant_method": method, "bits": 4})
    with refuses(ConfigurationError, "quantization_config.quant_method", method, "or a GGUF file"):
        plan(model, tmp_path)
    assert refusal(lambda: plan(model, tmp_path)) == refusal(lambda: TransformersTarget(config_of(model)))


def test_a_configuration_that_transformers_refuses(model: Path) -> None:
    configure(model, rms_norm_eps="small")
    assert "'rms_norm_eps' expected float, got str" in refusal(lambda: TransformersTarget(config_of(model)))


def without(part: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: weight for name, weight in weights.items() if part not in name}


CHANGES: dict[str, tuple[Callable[[Weights], Weights], str]] = {
    "layer": (without("layers.1."), "nothing of layer 1; 1 layers are there, config.json says 2"),
    "weight": (without("1.mlp.up_proj"), "hold no model.layers.1.mlp.up_proj.weight"),
    "two": (without(".up_proj"), "hold no model.layers.0.mlp.up_proj.weight"),
    "shape": (
        lambda weights: weights | {"model.norm.weight": torch.ones(8)},
        "model.norm.weight is (8,), its configuration says (64,)",
    ),
    "bias": (
        lambda weights: weights | {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)},
        "hold model.layers.0.self_attn.q_proj.bias, for which LlamaForCausalLM has no place",
    ),
    "more": (
        lambda weights: weights | {"model.layers.2.mlp.up_proj.weight": torch.ones(8)},
        "hold model.layers.2.mlp.up_proj.weight, for which",
    ),
    "nan": (lambda weights: weights | {"model.norm.weight": torch.full((64,), float("nan"))}, "model.norm.weight holds"),
}


@pytest.mark.parametrize("way", ["whole", "stages", "as_stored"])
@pytest.mark.parametrize("change", CHANGES)
def test_weights(change: str, way: str, model: Path) -> None:
    alter, says = CHANGES[change]
    weights = alter(load_file(model / "model.safetensors"))
    settings: dict[str, object] = {"stages": 2} if way == "stages" else {}
    if way == "as_stored":
        if library() is None:
            pytest.skip("no C compiler here")
        settings = {"kernels": "auto", "weights": "as_stored"}
        weights = {name: weight.bfloat16() for name, weight in weights.items()}
        configure(model, dtype="bfloat16")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    config = config_of(model, **settings)
    with refuses(ConfigurationError, says=says):
        load_layers(config, range(2)) if way == "stages" else load_whole(config)


def test_an_output_layer_of_its_own_that_is_not_there(model: Path) -> None:
    configure(model, tie_word_embeddings=False)
    for load_it in (lambda: load_whole(config_of(model)), lambda: load_layers(config_of(model, stages=2), range(1))):
        assert "hold no lm_head.weight" in refusal(load_it)


def test_attention_that_does_not_go_through_the_interface(model: Path) -> None:
    configure(model, model_type="git")
    assert "models of the type git compute attention by classes of their own" in refusal(
        lambda: TransformersTarget(config_of(model))
    )


def test_what_is_superfluous_but_harmless(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "value_head.weight": torch.ones(1, 64)}
    save_file(weights | more, model / "model.safetensors", {"format": "pt"})
    load_whole(config_of(model))
    load_layers(config_of(model, stages=2), range(1))


def test_folders_of_other_kinds(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "pytorch_model.bin, which is never opened" in refusal(lambda: plan(model, tmp_path))
    (model / "pytorch_model.bin").rename(model / "x.gguf")
    assert "to serve x.gguf, name that file" in refusal(lambda: plan(model, tmp_path))
    (model / "x.gguf").rename(model / "model-00001-of-00002.safetensors")
    assert "model.safetensors.index.json" in refusal(lambda: plan(model, tmp_path))
    (model / "adapter_config.json").write_text("{}")
    told = refusal(lambda: plan(model, tmp_path))
    assert "name the adapter in verifier.lora_modules" in told
    assert told == refusal(lambda: TransformersTarget(config_of(model)))


def test_the_tokeniser_of_a_larger_model(model: Path, tmp_path: Path) -> None:
    configure(model, vocab_size=300)
    assert "vocab_size in config.json is 300: it is the tokeniser of another model" in refusal(lambda: plan(model, tmp_path))


def test_symlinks_that_lead_nowhere(model: Path, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "no such folder" in refusal(lambda: plan(loop, tmp_path))
    (model / "config.json").unlink()
    (model / "config.json").symlink_to(model / "config.json")
    assert "has no config.json" in refusal(lambda: plan(model, tmp_path))


def test_a_folder_that_may_not_be_read(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    assert refusal(lambda: plan(model, tmp_path)).endswith("config.json cannot be read (Permission denied)")


def test_gguf_files_that_say_more_than_transformers_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = "its positions are scaled (rope.scaling.type: yarn), which transformers does not read from GGUF"
    for add, message in (
        (lambda writer: writer.add_string("llama.rope.scaling.type", "yarn"), scaled),
        (lambda writer: writer.add_uint32("llama.attention.sliding_window", 64), "attention.sliding_window: 64"),
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.full(8, 2, np.float32)), "it holds rope_freqs.weight"),
    ):
        own = GGUFWriter.add_eos_token_id

        def also(writer: GGUFWriter, token: int, add: Any = add, own: Any = own) -> None:
            own(writer, token)
            add(writer)

        with monkeypatch.context() as patched:
            patched.setattr(GGUFWriter, "add_eos_token_id", also)
            folder = Path(str(tmp_path / f"{len(message)}"))
            folder.mkdir()
            file = make_tiny_gguf(folder, {})
        assert gguf_header.check(file) == "llama"
        assert message in refusal(lambda file=file: resolve(str(file), tmp_path / "cache"))  # type: ignore[misc]


def test_a_split_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = GGUFWriter.add_eos_token_id
    monkeypatch.setattr(
        GGUFWriter, "add_eos_token_id", lambda self, token: (own(self, token), self.add_uint16("split.count", 2))
    )
    file = make_tiny_gguf(tmp_path, {})
    assert "one of 2 files of a model" in refusal(lambda: gguf_header.check(file))


def test_types_are_those_that_transformers_knows() -> None:
    from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    known = known_types()
    assert known is not None
    assert known.all >= set(CONFIG_MAPPING_NAMES)
    assert known.causal == set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert known.masked == set(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    assert known.seq2seq == set(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    assert known_gguf_architectures() == {*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_ARCHS}
    # Names that are none any more would refuse nothing.
    assert known.causal >= {*refusals._ENCODER_DECODERS, *refusals._SOUND, *refusals._RECURRENT, *refusals._MASKED}


def test_sizes_of_blocks_are_those_of_the_gguf_package() -> None:
    from gguf.constants import GGML_QUANT_SIZES

    assert {int(kind): size for kind, size in GGML_QUANT_SIZES.items()} == gguf_header._BLOCKS


def test_whatever_is_raised_becomes_one_line() -> None:
    class PanicException(BaseException):
        """As Rust's libraries raise it."""

    for error, told in (
        (ValueError("a\n  \x1b[31mb\x1b[0m"), "cannot load it: a b"),
        (KeyError("x"), "cannot load it: KeyError: 'x'"),
        (RuntimeError(), "cannot load it: RuntimeError"),
        (PanicException("at the\ndisco"), "cannot load it: PanicException: at the disco"),
        (RecursionError("deep"), "cannot load it: deep"),
    ):
        with pytest.raises(ConfigurationError) as caught, reading("load it"):
            raise error
        assert str(caught.value) == told
        assert caught.value.__cause__ is error
    for error in (Unavailable("x"), KeyboardInterrupt(), SystemExit(1)):
        with pytest.raises(type(error)), reading("load it"):
            raise error
    assert len(one_line(ValueError("x" * 10_000))) == 400


def test_another_model_of_the_same_type_is_no_mistake(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", sliding_window=None, layer_types=["full_attention"] * 2)
    plan(folder, tmp_path)
    TransformersTarget(config_of(folder))
