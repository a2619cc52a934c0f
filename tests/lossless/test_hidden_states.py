"""Hidden states of named layers are transformers' own: of prompt chunks, of tree nodes, along accepted paths, whatever else
shares the pass; and asking for them changes no logit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from services.verifier.config import TargetConfig
from services.verifier.engine.request_checks import check_request
from services.verifier.kernels.native.library import library
from services.verifier.loading.adapters import exact_attention
from services.verifier.model import slice as model_slice
from services.verifier.model.hidden_states import HiddenStates
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from speculation.errors import InvalidArgument
from speculation.messages import GenerationRequest
from speculation.types import Features, Plan, SamplingParams
from tests.engine.stage_forks import launch_fork
from tests.running.refusals import refuses

# One process, since the models are shared.
pytestmark = pytest.mark.xdist_group("hidden states")

LAYERS = 4
# Every layer from the front and from the back, in no order, and what the output layer reads.
ASKED = (2, -1, 0, -2, 3, 1, -4)
LENGTH = 60
_SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 0,
}  # fmt: skip
_GPT: dict[str, Any] = {
    "vocab_size": 300, "n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 512, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "qwen2": _SIZES,
    "qwen3": {**_SIZES, "head_dim": 16},
    "gpt2": _GPT,
    "gemma": {**_SIZES, "head_dim": 16},
    "gemma3_text": {**_SIZES, "head_dim": 16, "sliding_window": 16},
    "opt": {**_SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {**_SIZES, "n_layer": LAYERS, "n_head": 4},
    "mixtral": {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    # What its output layer reads is not what its decoder makes: it is scaled between them.
    "minicpm3": {**_SIZES, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
                 "qk_rope_head_dim": 16, "v_head_dim": 16, "head_dim": None},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A target, a text, and [LENGTH, hidden size] of every layer by transformers' own pass over the text."""

    target: TransformersTarget
    text: list[int]
    expected: dict[int, torch.Tensor]


def make(folder: Path, kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **MODELS[kind])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=exact_attention(config))
    model.float().eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 and "norm" in name:
            # Made as ones, which would hide who forgets them.
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def reference(model: PreTrainedModel, text: list[int]) -> dict[int, torch.Tensor]:
    """By transformers: ``output_hidden_states``, but of the last layer before the norm, and of what the output layer reads."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == LAYERS)
    seen: list[torch.Tensor] = []
    last: nn.Module = next(lists)[-1]
    hooks = [
        last.register_forward_hook(lambda _, __, made: seen.append(made if isinstance(made, torch.Tensor) else made[0])),
        model.get_output_embeddings().register_forward_pre_hook(lambda _, given: seen.append(given[0])),
    ]
    states = model(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
    for hook in hooks:
        hook.remove()
    assert len(states) == LAYERS + 1
    before_norm, read = seen[-2][0], seen[-1][0]
    made = {layer: states[layer + 1][0] for layer in range(LAYERS - 1)}
    return made | {layer - LAYERS: rows for layer, rows in made.items()} | {LAYERS - 1: before_norm, -1: read}


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, target_layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make(folder, request.param)
    target = TransformersTarget(config_of(folder))
    source = random.Random(1)
    text = [source.randrange(1, 300) for _ in range(LENGTH)]
    yield Served(target=target, text=text, expected=reference(model, text))
    assert target.blocks.available == target.blocks.total


def config_of(folder: Path, **settings: Any) -> TargetConfig:
    return TargetConfig(model_path=str(folder), kv_cache_tokens=1024, max_model_len=256, threads=1, **settings)


def chunk(name: str, start: int, tokens: Sequence[int], layers: tuple[int, ...] = (), logits: int = 0) -> Rows:
    return Rows(request_id=name, context=start, tokens=tuple(tokens), logits=logits, layers=layers)


def numbers(features: Features) -> torch.Tensor:
    """[rows, width], float32."""
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}[features.dtype]
    return torch.frombuffer(bytearray(features.data), dtype=dtype).reshape(features.rows, features.width).float()


def check(features: Features, expected: dict[int, torch.Tensor], start: int, layers: tuple[int, ...] = ASKED) -> None:
    """Rows of the text from position ``start`` on."""
    assert (features.layers, features.start) == (layers, start)
    right = torch.cat([expected[layer][start : start + features.rows] for layer in layers], dim=-1)
    assert features.width == right.shape[1]
    # float16 has eleven bits; computed in another order, large numbers leave something in small ones.
    torch.testing.assert_close(numbers(features), right, rtol=2e-3, atol=2e-3 * float(right.abs().mean()))


@pytest.mark.examples(4)
def test_prompt_chunks_nodes_and_accepted_paths(served: Served) -> None:
    """A prompt in two chunks beside another request that asks for one layer, then a tree beside a prompt that asks for none."""
    target, text, expected = served.target, served.text, served.expected
    for name in ("asking", "other", "plain"):
        assert target.open(name, 100)
    target.forward([chunk("plain", 0, text[5:25]), chunk("asking", 0, text[:17], ASKED), chunk("other", 0, text[:9], (1,))])
    check(target.features("asking", range(17)), expected, 0)
    check(target.features("other", [2, 3, 4]), expected, 2, (1,))
    target.keep("asking", 0, range(17))
    target.keep("plain", 0, range(20))
    target.forward([chunk("asking", 17, text[17:41], ASKED, logits=1), chunk("plain", 20, text[:3], logits=3)])
    check(target.features("asking", range(3, 24)), expected, 20)
    target.keep("asking", 17, range(24))
    # The right nodes are 1, 2 and 4.
    nodes = (7, text[42], text[43], 9, text[44])
    tree = Rows(
        request_id="asking", context=41, tokens=(text[41], *nodes), parents=(-1, -1, 1, 0, 2), logits=6, layers=ASKED
    )
    target.forward([tree, chunk("other", 0, text[:50], (), logits=1)])
    check(target.features("asking", [0, 2, 3, 5]), expected, 41)
    check(target.features("asking", [3]), expected, 43)
    assert not torch.equal(numbers(target.features("asking", [1])), numbers(target.features("asking", [2])))
    target.keep("asking", 41, [0, 2, 3, 5])
    target.forward([chunk("asking", 45, text[45:46], (-1,), logits=1)])
    check(target.features("asking", [0]), expected, 45, (-1,))
    for name in ("asking", "other", "plain"):
        target.close(name)


def test_fetched_together_they_are_the_same_bits(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """What several requests ask for, of the same layers and of others, comes to the host at once."""
    target, text = served.target, served.text
    rows = {"first": [0, 3, 7], "second": [2], "third": range(5)}
    for name in rows:
        assert target.open(name, 100)
    batch = [
        chunk("first", 0, text[:8], ASKED), chunk("second", 0, text[5:9], (1, -1)), chunk("third", 0, text[3:9], ASKED),
    ]  # fmt: skip
    target.forward(batch)
    apart = [target.features(name, some) for name, some in rows.items()]
    target.forward(batch)
    target.fetch_features(rows)
    monkeypatch.setattr(HiddenStates, "fetch", lambda *_: 1 / 0)
    assert [target.features(name, some) for name, some in rows.items()] == apart
    assert target.features("third", [4]).data == apart[2].part(4, 5).data
    for name in rows:
        target.close(name)


def test_asking_changes_no_bit(served: Served) -> None:
    """Neither of logits nor, where rows are exact, of the states themselves, whoever shares the pass."""
    target, text = served.target, served.text
    for name in ("silent", "asking", "beside"):
        assert target.open(name, 100)
    silent = target.forward([chunk("silent", 0, text[:30], (), logits=3)])[0]
    asking = target.forward([chunk("asking", 0, text[:30], ASKED, logits=3)])[0]
    assert torch.equal(asking, silent)
    alone = target.features("asking", range(30)).data
    target.forward([chunk("silent", 30, text[30:40]), chunk("beside", 0, text[:30], ASKED)])
    if target.exact:
        assert target.features("beside", range(30)).data == alone
    for module in target._part.model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    for name in ("silent", "asking", "beside"):
        target.close(name)


def test_layers_that_there_are_not(served: Served) -> None:
    served.target.check_layers(ASKED)
    for layer in (LAYERS, -LAYERS - 1):
        with refuses(InvalidArgument, "observe_layers", layer, allowed="from -4 to 3: the model has 4 layers"):
            served.target.check_layers((0, layer))
    plan = Plan(strategy="any", sources=("any",), max_nodes=4, observe_layers=(9,))
    request = GenerationRequest(request_id="r", prompt=(1, 2), sampling=SamplingParams(), plan=plan)
    with refuses(InvalidArgument, field="observe_layers", value=9):
        check_request(request, served.target)


def test_a_model_whose_layers_cannot_be_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its output layer reads can be had all the same."""
    make(tmp_path, "llama")
    load = model_slice.load_whole

    def twice(config: TargetConfig) -> PreTrainedModel:
        model = load(config)
        model.model.layers[1] = model.model.layers[0]
        return model

    monkeypatch.setattr(model_slice, "load_whole", twice)
    target = TransformersTarget(config_of(tmp_path))
    target.check_layers((-1,))
    with refuses(
        InvalidArgument,
        field="observe_layers",
        value=2,
        allowed="-1: the layers of LlamaForCausalLM cannot be observed one by one",
    ):
        target.check_layers((-1, 2))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_hidden_states_of_other_dtypes_are_close(tmp_path: Path, dtype: Any) -> None:
    """bfloat16 where the model computes in it; roughly the same numbers."""
    model = make(tmp_path, "llama")
    text = list(range(1, 31))
    target = TransformersTarget(config_of(tmp_path, dtype=dtype))
    assert target.open("a", 40)
    target.forward([chunk("a", 0, text, ASKED)])
    features = target.features("a", range(30))
    assert features.dtype == ("bfloat16" if dtype == "bfloat16" else "float16")
    expected = torch.cat([reference(model, text)[layer] for layer in ASKED], dim=-1)
    distance = (numbers(features) - expected).norm() / expected.norm()
    assert float(distance) < 0.1


def test_numbers_that_float16_cannot_hold(tmp_path: Path) -> None:
    model = make(tmp_path, "llama")
    model.model.layers[2].mlp.down_proj.weight.data *= 1e6
    model.save_pretrained(tmp_path)
    target = TransformersTarget(config_of(tmp_path))
    assert target.open("a", 40)
    target.forward([chunk("a", 0, range(1, 9), (2,))])
    found = numbers(target.features("a", range(8)))
    assert bool(found.isfinite().all())
    assert float(found.abs().max()) == torch.finfo(torch.float16).max


def test_layers_in_one_call_each_are_observed(tmp_path: Path) -> None:
    """Of our own kernels, which the other tests may or may not have had."""
    if library() is None:
        pytest.skip("our kernels cannot be compiled or run here")
    model = make(tmp_path, "llama")
    target = TransformersTarget(config_of(tmp_path, kernels_dir=tmp_path / "kernels"))
    fused = [type(layer.forward).__name__ for layer in target._part.model.model.layers]
    if target.kernels.instructions is None or "FusedLayer" not in fused:
        pytest.skip(f"torch is faster here, layers are {fused}")
    assert target.open("a", 40)
    text = list(range(1, 31))
    target.forward([chunk("a", 0, text, ASKED)])
    check(target.features("a", range(30)), reference(model, text), 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stages", [2, LAYERS])
def test_layers_of_every_stage(tmp_path: Path, stages: int) -> None:
    """They come along with the pass; two passes are under way, and another request asks for nothing."""
    model = make(tmp_path, "llama")
    text = list(range(1, 41))
    expected = reference(model, text)
    target = TransformersTarget(config_of(tmp_path, stages=stages), launch_fork)
    try:
        target.check_layers(ASKED)
        for name in ("a", "b"):
            assert target.open(name, 60)
        target.begin([chunk("b", 0, text[:10]), chunk("a", 0, text[:20], ASKED)])
        target.end_pass()
        check(target.features("a", range(20)), expected, 0)
        target.keep("a", 0, range(20))
        target.keep("b", 0, range(10))
        target.begin([chunk("b", 10, text[10:20], (0, -1))])
        target.begin([chunk("a", 20, text[20:], ASKED, logits=2)])
        target.end_pass()
        check(target.features("b", range(10)), expected, 10, (0, -1))
        target.end_pass()
        check(target.features("a", range(20)), expected, 20)
    finally:
        target.shutdown()
