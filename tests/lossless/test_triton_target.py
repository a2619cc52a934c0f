"""A whole target whose attention is Triton's, through its interpreter with Hopper's products: bits as in plain decoding."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GemmaConfig, GemmaForCausalLM, PreTrainedModel
from typing_extensions import override

pytest.importorskip("triton")
from services.verifier.attention.calls import Call
from services.verifier.attention.on_gpu import GpuAttention, pool_and_buckets, refusal
from services.verifier.checks.exactness import is_exact
from services.verifier.config import TargetConfig
from services.verifier.kernels import gpu_choice as gpu_kernels
from services.verifier.kernels.cpu_choice import Choice
from services.verifier.kernels.triton.decoder_layer import RowDecoderLayer
from services.verifier.kernels.triton.row_products import Product, RowLinear
from services.verifier.kernels.triton.tree_pass import TritonBuckets
from services.verifier.kernels.triton.virtual_groups import GROUP, VirtualGroup, pack
from services.verifier.kernels.whole_vectors import fill_vectors
from services.verifier.kv_cache.pool import KVPool
from services.verifier.model.means import TargetMeans
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from tests.kernels.triton_interpreter import hopper
from tests.tiny_models.tiny import make_tiny_model, make_tiny_tokenizer

LENGTH = 70


class Packing:
    """Puts the nodes of a tree into groups, rightly until it is told not to."""

    def __init__(self) -> None:
        self.neighbours_seen = False

    def buckets(self, pool: KVPool) -> TritonBuckets:
        return TritonBuckets(pool, self._pack)

    def _pack(self, *given: Any) -> list[list[VirtualGroup]]:
        return _neighbours_seen(*given) if self.neighbours_seen else pack(*given)


@pytest.fixture
def packing() -> Packing:
    return Packing()


@pytest.fixture
def target(tmp_path: Path, packing: Packing) -> Iterator[TransformersTarget]:
    """Attention as on a GPU; the linear layers are those of the CPU, which are exact."""
    means = TargetMeans(attention=GpuAttention(refusal=lambda *_: "", buckets=packing.buckets))
    make_tiny_model(tmp_path, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=1, hidden_size=48)
    with hopper():
        config = TargetConfig(model_path=str(tmp_path), kv_cache_tokens=512, max_model_len=256)
        made = TransformersTarget(config, means=means)
        yield made
        made.shutdown()


def rows(name: str, context: int, tokens: list[int], parents: tuple[int, ...] = ()) -> Rows:
    chosen = 1 + len(parents) if parents else len(tokens)
    return Rows(request_id=name, context=context, tokens=tuple(tokens), parents=parents, logits=chosen)


@pytest.mark.examples(2)
@pytest.mark.parametrize("captured", [False, True], ids=["launched", "in buckets"])
def test_trees_have_the_bits_of_plain_decoding(
    tmp_path: Path, target: TransformersTarget, captured: bool, packing: Packing
) -> None:
    assert target.exact
    if captured:
        # As on a GPU, but launched one by one.
        target._part._graphs = target._part._captured(target._config)
    source = random.Random(0)
    text = [source.randrange(target.vocab_size) for _ in range(LENGTH)]
    assert target.open("alone", LENGTH + 8) and target.open("tree", LENGTH + 8)
    whole = target.forward([rows("alone", 0, text)])[0]
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(torch.tensor([text])).logits[0]
    assert torch.allclose(whole, reference, atol=2e-4)
    alone = torch.cat([target.forward([rows("alone", at, [text[at]])])[0] for at in range(60, 66)])
    assert torch.equal(alone, whole[60:66])
    target.forward([rows("tree", 0, text[:60])])
    # Across a border of tiles, beside another request: two branches, and siblings of the path.
    nodes, parents = [text[61], 5, text[62], 9, text[63], 3, text[64], text[65]], (-1, -1, 0, 1, 2, 3, 4, 6)
    branch = rows("tree", 60, [text[60], *nodes], parents)
    made = target.forward([rows("alone", 66, text[66:68]), branch])[1]
    path = [0, 1, 3, 5, 7, 8]
    assert torch.equal(made[path], alone)
    # The accepted path is kept, and what follows it is computed as ever.
    target.keep("tree", 60, path)
    assert torch.equal(target.forward([rows("tree", 66, text[66:68])])[0], whole[66:68])
    if not captured:
        packing.neighbours_seen = True
        target.forward([rows("tree", 0, text[:60])])
        assert not torch.equal(target.forward([branch])[0][path], alone)


def _neighbours_seen(*given: Any) -> list[list[VirtualGroup]]:
    """A fault: every lane's neighbour is seen as well."""
    made = pack(*given)
    return [
        [replace(one, masks=tuple((mask | mask << 1) & (1 << GROUP) - 1 for mask in one.masks)) for one in tile]
        for tile in made
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["llama", "gemma"])
def test_linear_layers_norms_and_gates_by_row_kernels(tmp_path: Path, layout: str) -> None:
    """All that a pass computes, as on a GPU: equal bits whatever shares it, and transformers' numbers. Then a fault."""
    sizes = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 160, "head_dim": 16}
    if layout == "llama":
        make_tiny_model(tmp_path, num_hidden_layers=1, **sizes)
    else:
        make_tiny_tokenizer(tmp_path)
        torch.manual_seed(0)
        made = GemmaForCausalLM(
            GemmaConfig(vocab_size=320, num_hidden_layers=1, initializer_range=0.4, hidden_activation="gelu", **sizes)
        )
        for norm in (module for module in made.modules() if type(module).__name__ == "GemmaRMSNorm"):
            torch.nn.init.normal_(norm.weight, std=0.3)
        made.save_pretrained(tmp_path)
    cut = Cut()
    means = TargetMeans(attention=GpuAttention(refusal=lambda *_: ""), pack=cut.row_kernels)
    config = TargetConfig(model_path=str(tmp_path), kv_cache_tokens=256, max_model_len=128)
    with hopper():
        target = TransformersTarget(config, means=means)
        assert target.exact and target.kernels.min_rows == 1
        kinds = [type(module).__name__ for module in target._part.model.modules()]
        gates = {"llama": 1, "gemma": 0}[layout]
        assert all(isinstance(layer.forward, RowDecoderLayer) for layer in target._part.model.get_decoder().layers)
        assert (kinds.count("RowNorm"), kinds.count("RowFeedForward"), kinds.count("Linear")) == (3, gates, 0)
        text = [at * 37 % target.vocab_size for at in range(22)]
        assert target.open("whole", 30) and target.open("tree", 30)
        whole = target.forward([rows("whole", 0, text)])[0]
        reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(torch.tensor([text])).logits[0]
        assert torch.allclose(whole, reference, atol=3e-4)
        for end in (3, 18):
            target.forward([rows("tree", 0, text[:end])])
            branch = rows("tree", end, [text[end], text[end + 1], 7, text[end + 2]], (-1, -1, 0))
            made_rows = target.forward([rows("whole", 22, [5]), branch])[1]
            assert torch.equal(made_rows[[0, 1, 3]], whole[end : end + 3])
        # Sums that are cut by the number of rows; where many rows have others, the check at start sees it, too.
        cut.few = 64
        assert not is_exact(target)
        cut.few = 4
        alone = target.forward([rows("whole", 22, [5])])[0]
        assert not torch.equal(alone, target.forward([rows("tree", 0, text), rows("whole", 22, [5])])[1])
        target.shutdown()


class Cut:
    """Layers whose sums are cut by the number of rows once ``few`` says where: a fault.

    Attributes:
        few: rows up to which the parts of a sum are long; 0: always, as is right.
    """

    def __init__(self) -> None:
        self.few = 0

    def row_kernels(self, model: PreTrainedModel, config: TargetConfig) -> Choice:
        fill_vectors()
        gpu_kernels.put(model, "triton", torch.device(config.device), make=lambda *given: _CutLinear(self, *given))
        return Choice(linears="triton")


class _CutLinear(RowLinear):
    def __init__(self, cut: Cut, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self._cut = cut

    @override
    def product(self, given: torch.Tensor) -> Product:
        if self._cut.few:
            self.leaf = 128 if given.numel() // given.shape[-1] <= self._cut.few else 64
        return super().product(given)


def a_call(size: int = 64, share: int = 2) -> Call:
    return Call(entry=0, heads=share, kv_heads=1, key_size=size, value_size=size, scale=0.1)


class Broken(TritonBuckets):
    """Passes that fail."""

    @override
    def launched(self, *_: Any) -> Any:
        raise RuntimeError("no C compiler")


def test_where_triton_is_not_used() -> None:
    """Not on a CPU, without Triton, on old GPUs, with odd heads, or where a trial pass fails; the cache then has its ones."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")

    def refused(call: Call, device: torch.device, capability: tuple[int, int] = (9, 0), **given: Any) -> str:
        return refusal([call], torch.bfloat16, device, capability_of=lambda _: capability, **given)

    assert refused(a_call(), cpu) == "the device is cpu"
    assert refused(a_call(), cuda) == ""
    assert refused(a_call(8), cuda) == "heads are 8 wide: must be from 16 to 256"
    assert "compute capability is 7.0" in refused(a_call(), cuda, (7, 0))
    assert refused(a_call(), cuda, find=lambda _: None) == "triton is not installed"
    here = GpuAttention(refusal=lambda *_: "")
    pool, buckets = pool_and_buckets([a_call()], 64, torch.float32, cpu, means=here)
    assert buckets is not None and pool.values[0].shape[-1] == 64
    # Blocks of rows are those of the call with most queries a key.
    calls = [a_call(), replace(a_call(share=16), entry=1)]
    wide = pool_and_buckets(calls, 64, torch.float32, cpu, means=here)[1]
    batch = [Rows(request_id="a", context=0, tokens=(1, 2), logits=1)]
    shape = None if wide is None else wide.bucket(batch)
    assert shape is not None and shape.block_rows == 4
    pool, buckets = pool_and_buckets([a_call()], 64, torch.float32, cpu, means=replace(here, buckets=Broken))
    assert buckets is None and pool.values[0].shape[-1] == 65
