"""LoRA adapters of models of many types, and of weights in every form: the same bits beside others, and PEFT's logits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.verifier.config import TargetConfig
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Prefix, Rows
from tests.kernels.kernels_here import needs_kernels
from tests.lossless.architectures import make
from tests.tiny_models.lora import make_adapter

pytestmark = needs_kernels

NAMES = ("", "one", "two")
# A transposed layer; joint projections; layers with a state; experts that are no linear layers. And more of each, and
# embeddings that scale their rows.
TYPES = ("gpt2", "phi3", "lfm2", "mixtral")
FURTHER = ("bloom", "cohere", "falcon", "gemma2", "gemma3_text", "glm4", "gpt_oss", "gptj", "nemotron", "olmo2", "opt", "phi", "qwen3", "qwen3_moe",
           "starcoder2", "bamba", "jamba")  # fmt: skip


def made(folder: Path, model: Path, **settings: object) -> tuple[TransformersTarget, Path]:
    """A target with two adapters of all layers that may have one, and the first one's folder."""
    config = TargetConfig(
        model_path=str(model),
        kv_cache_tokens=1024,
        max_model_len=128,
        lora_folders=(folder,),
        **settings,  # type: ignore[arg-type]
    )
    target = TransformersTarget(config)
    adapters = target._part.adapters
    assert adapters is not None
    ends = {name.rpartition(".")[2] for name in adapters.layers}
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    others = {name.rpartition(".")[2] for name, _ in base.named_modules() if name not in adapters.layers}
    targets = sorted(ends - others)
    for seed, name in enumerate(NAMES[1:], 1):
        where = make_adapter(folder / name, model, seed=seed, rank=2 + seed, targets=targets[:: 3 - seed], size=0.1)
        target.load_adapter(name, where)
    return target, folder / "two"


def logits_alone(target: TransformersTarget, text: list[int], adapter: str) -> torch.Tensor:
    assert target.open("alone", len(text), Prefix(tokens=text, adapter=adapter))
    found = []
    for at, token in enumerate(text):
        found.append(target.forward([Rows(request_id="alone", context=at, tokens=(token,), logits=1)])[0][0])
        target.keep("alone", at, [0])
    target.close("alone")
    return torch.stack(found)


def check_together(target: TransformersTarget, text: list[int], alone: dict[str, torch.Tensor]) -> None:
    """Check that the rows of all, in one pass, have the bits that they have alone."""
    order = ("two", "", "one")
    for name in order:
        assert target.open(f"of {name}", len(text), Prefix(tokens=text, adapter=name))
    batch = [Rows(request_id=f"of {name}", context=0, tokens=tuple(text), logits=len(text)) for name in order]
    for name, logits in zip(order, target.forward(batch), strict=True):
        assert torch.equal(logits, alone[name]), name
    for name in order:
        target.close(f"of {name}")


@pytest.mark.examples(4)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:Model has .tie_word_embeddings=True")
@pytest.mark.parametrize("kind", [*TYPES, *[pytest.param(kind, marks=pytest.mark.exhaustive) for kind in FURTHER]])
def test_models_of_all_types(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = tmp_path / "model"
    folder.mkdir()
    assert make(kind, folder) is not None
    target, adapter = made(tmp_path, folder)
    source = random.Random(1)
    text = [source.randrange(3, min(200, target.vocab_size)) for _ in range(30)]
    alone = {name: logits_alone(target, text, name) for name in NAMES}
    check_together(target, text, alone)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = peft.PeftModel.from_pretrained(base, adapter).eval()(torch.tensor([text])).logits[0]
    size = float(expected.abs().max())
    assert (alone["two"] - alone[""]).abs().max() > 0.01 * size
    assert torch.allclose(alone["two"], expected, atol=5e-5 * size)


@pytest.mark.parametrize("settings", [{"dtype": "int8"}, {"weights": "as_stored"}], ids=["int8", "as stored"])
def test_weights_of_all_forms(tiny_model: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    halves = tmp_path / "halves"
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    model.save_pretrained(halves)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (halves / file).write_bytes((tiny_model / file).read_bytes())
    target, _ = made(tmp_path, halves, **settings)
    text = [5 + 7 * at % 200 for at in range(40)]
    alone = {name: logits_alone(target, text, name) for name in NAMES}
    assert len({tuple(each.argmax(-1).tolist()) for each in alone.values()}) == 3
    check_together(target, text, alone)
