"""Whole layers by our GPU kernels have the bits of transformers' modules over the same kernels, or are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

pytest.importorskip("triton")
from services.verifier.attention import calls as attention
from services.verifier.attention.calls import Call, Calls, Running, answering
from services.verifier.attention.recording import record
from services.verifier.kernels.triton.decoder_layer import RowDecoderLayer, fuse_layers
from services.verifier.kernels.triton.pass_shape import GpuAttentionSizes, PassShape
from services.verifier.kernels.triton.row_layers import use_row_kernels
from services.verifier.kernels.triton.row_products import HeadNorms, Product
from services.verifier.kernels.triton.tree_pass import TritonPass
from services.verifier.kv_cache.pool import KVPool
from services.verifier.model.target_port import Rows
from tests.kernels.triton_interpreter import hopper

pytestmark = pytest.mark.exhaustive

Turns = tuple[torch.Tensor, torch.Tensor]
SIZES = {
    "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.4, "max_position_embeddings": 64, "pad_token_id": 0,
    "attn_implementation": attention.NAME, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


class Served:
    """A model over our kernels, and passes of it."""

    def __init__(self, kind: str, dtype: torch.dtype, **settings: Any) -> None:
        attention.register()
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **settings}), dtype=dtype)
        self.model: PreTrainedModel = made.eval().requires_grad_(False)
        for norm in (each for each in made.modules() if type(each).__name__.endswith("Norm")):
            torch.nn.init.normal_(norm.weight, std=0.3)
        use_row_kernels(self.model)
        self.calls: Calls = record(self.model, torch.arange(1, 6)[None], 64).calls
        own: list[Call] = [call for calls in self.calls.values() for call in calls]
        self.pool = KVPool(own, rows=128, dtype=dtype, device=torch.device("cpu"), whole_rows=True)
        self.pool.assign("one", [0], 0)
        self.pool.assign("two", [1], 0)

    @torch.inference_mode()
    def run(self, batch: Sequence[Rows]) -> tuple[torch.Tensor, Running]:
        """[rows, vocabulary], with one row of padding."""
        laid_out = TritonPass(self.pool, shape_of(batch, self.pool, 1 + sum(len(each.tokens) for each in batch)))
        laid_out.fill(batch)
        running = Running(laid_out, self.calls)
        with answering(running):
            found = self.model(input_ids=laid_out.tokens[None], position_ids=laid_out.positions[None], use_cache=False)
        return found.logits[0], running

    def fuse(self) -> tuple[int, str]:
        return fuse_layers(self.model.get_decoder(), lambda: self.run([FIRST])[1], self.calls)


def shape_of(batch: Sequence[Rows], pool: KVPool, rows: int) -> PassShape:
    return PassShape.of(batch, GpuAttentionSizes.of(pool.calls, pool.device), rows)


FIRST = Rows(request_id="one", context=0, tokens=(3, 1, 4), logits=1)
TREE = [
    Rows(request_id="two", context=0, tokens=(8, 9), logits=1),
    Rows(request_id="one", context=0, tokens=(3, 1, 4, 5), parents=(-1, -1), logits=3),
]

TAKEN: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "llama": ("llama", torch.float32, {"num_hidden_layers": 2}),
    "llama in bfloat16": ("llama", torch.bfloat16, {}),
    "norms of heads": ("qwen3", torch.float32, {}),
    "norms of heads in bfloat16": ("qwen3", torch.bfloat16, {}),
    "norms of heads, sums in leaves": ("qwen3", torch.bfloat16, {"hidden_size": 192}),
    "biases": ("qwen2", torch.float32, {}),
    "a part is rotated, one product": ("phi3", torch.float32, {"partial_rotary_factor": 0.5}),
    "other norms and gates": ("gemma", torch.float32, {}),
}


@pytest.mark.examples(3)
@pytest.mark.parametrize("name", TAKEN)
def test_the_bits_of_the_modules(name: str) -> None:
    kind, dtype, settings = TAKEN[name]
    served = Served(kind, dtype, **settings)
    with hopper():
        plain = served.run(TREE)[0]
        kept = [each.clone() for each in (*served.pool.keys, *served.pool.values)]
        assert served.fuse() == (settings.get("num_hidden_layers", 1), "")
        for each in (*served.pool.keys, *served.pool.values):
            each.zero_()
        made = served.run(TREE)[0]
    assert torch.equal(made, plain)
    # All but the tile of padding rows.
    now = (*served.pool.keys, *served.pool.values)
    assert all(torch.equal(mine[:2], other[:2]) for mine, other in zip(now, kept, strict=True))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("cohere", "input_layernorm is no root mean square norm"),
        ("olmo2", "it has no input_layernorm"),
        ("glm", "the kernel computes something else, by "),
        ("granite", "the kernel computes something else, by "),
    ],
)
def test_what_is_refused(kind: str, said: str) -> None:
    """Norms elsewhere, neighbours that are rotated together, a factor before the residual: today's way, which says so."""
    settings = {"granite": {"residual_multiplier": 0.5}}.get(kind, {})
    done, reason = Served(kind, torch.float32, **settings).fuse()
    assert done == 0 and said in reason


def test_a_wrong_rotation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TritonPass.rotated

    def wrong(self: TritonPass, call: Call, product: Product, turns: Turns, norms: HeadNorms | None) -> torch.Tensor:
        return right(self, call, product, turns[::-1], norms)

    monkeypatch.setattr(TritonPass, "rotated", wrong)
    done, reason = Served("llama", torch.float32).fuse()
    assert done == 0 and "the kernel computes something else" in reason


@pytest.mark.parametrize(
    ("kind", "settings", "added"),
    [("llama", {}, []), ("qwen3", {"hidden_size": 192}, ["add_parts"])],
    ids=["llama", "qwen3"],
)
def test_kernels_of_a_layer(
    monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, int], added: Sequence[str]
) -> None:
    """Eight, where queries, keys and values, and gate and up, are one product each; one more before norms of heads."""
    served = Served(kind, torch.float32, **settings)
    served.fuse()
    width = settings.get("hidden_size", 32)
    launched: list[str] = []
    for module, names in (
        ("row_products", ("multiply", "add_parts", "add_and_normalise", "gate")),
        ("tree_pass", ("write_rows", "rotate_write", "attend", "merge")),
    ):
        for name in names:
            monkeypatch.setattr(f"services.verifier.kernels.triton.{module}.{name}", Noted(name, launched))
    layer = served.model.get_decoder().layers[0]
    assert isinstance(layer.forward, RowDecoderLayer)
    laid_out = TritonPass(served.pool, shape_of([FIRST], served.pool, 3))
    with answering(Running(laid_out, served.calls)), torch.inference_mode():
        layer(torch.zeros(1, 3, width), position_embeddings=(torch.ones(1, 3, 16), torch.zeros(1, 3, 16)))
    one = ["rotate_write", "attend", "multiply", "add_and_normalise", "multiply", "multiply", "add_and_normalise"]
    # Gate and up have few columns here, so with leaves the gate is a kernel of its own.
    if added:
        one.insert(5, "gate")
    # The first norm of all is a kernel more.
    assert launched == ["add_and_normalise", "multiply", *added, *one] and len(one) == 7 + len(added)


class Noted:
    """A kernel that only says that it was launched."""

    def __init__(self, name: str, launched: list[str]) -> None:
        self._name, self._launched = name, launched

    def __getitem__(self, grid: object) -> Noted:
        return self

    def __call__(self, *_: object, **__: object) -> None:
        self._launched.append(self._name)
