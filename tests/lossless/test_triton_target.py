"""A whole target whose attention is Triton's, through its interpreter with Hopper's products: bits as in plain decoding."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("triton")
from services.verifier.attention import on_gpu
from services.verifier.attention.calls import Call
from services.verifier.config import TargetConfig
from services.verifier.target import TransformersTarget
from services.verifier.target_port import Rows
from services.verifier.triton_kernels import pass_meta
from services.verifier.triton_kernels.triton_pass import TritonPass
from services.verifier.triton_kernels.virtual_groups import GROUP, VirtualGroup, pack
from tests.tiny import make_tiny_model
from tests.triton_interpreter import hopper

LENGTH = 70


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TransformersTarget]:
    """Attention as on a GPU; the linear layers are those of the CPU, which are exact."""
    monkeypatch.setattr(on_gpu, "refusal", lambda *_: "")
    make_tiny_model(tmp_path, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=1, hidden_size=48)
    with hopper():
        made = TransformersTarget(TargetConfig(model_path=str(tmp_path), kv_cache_tokens=512, max_model_len=256))
        yield made
        made.shutdown()


def rows(name: str, context: int, tokens: list[int], parents: tuple[int, ...] = ()) -> Rows:
    chosen = 1 + len(parents) if parents else len(tokens)
    return Rows(session_id=name, context=context, tokens=tuple(tokens), parents=parents, logits=chosen)


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "in buckets"])
def test_trees_have_the_bits_of_plain_decoding(
    tmp_path: Path, target: TransformersTarget, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert target.exact
    if captured:
        # As on a GPU, but launched one by one.
        target._part._graphs = target._part._captured()
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
        monkeypatch.setattr(pass_meta, "pack", _neighbours_seen)
        target.forward([rows("tree", 0, text[:60])])
        assert not torch.equal(target.forward([branch])[0][path], alone)


def _neighbours_seen(*given: Any) -> list[list[VirtualGroup]]:
    """A fault: every lane's neighbour is seen as well."""
    made = pack(*given)
    return [
        [replace(one, masks=tuple((mask | mask << 1) & (1 << GROUP) - 1 for mask in one.masks)) for one in tile]
        for tile in made
    ]


def a_call(size: int = 64) -> Call:
    return Call(entry=0, heads=2, kv_heads=1, key_size=size, value_size=size, scale=0.1)


def test_where_triton_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on a CPU, without Triton, on old GPUs, with odd heads, or where a trial pass fails; the cache then has its ones."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert on_gpu.refusal([a_call()], torch.bfloat16, cpu) == "the device is cpu"
    assert on_gpu.refusal([a_call()], torch.bfloat16, cuda) == ""
    assert on_gpu.refusal([a_call(8)], torch.bfloat16, cuda) == "heads are 8 wide: must be from 16 to 256"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    assert "compute capability is 7.0" in on_gpu.refusal([a_call()], torch.bfloat16, cuda)
    monkeypatch.setattr(on_gpu, "find_spec", lambda _: None)
    assert on_gpu.refusal([a_call()], torch.bfloat16, cuda) == "triton is not installed"
    monkeypatch.setattr(on_gpu, "refusal", lambda *_: "")
    pool, buckets = on_gpu.pool_and_buckets([a_call()], 64, torch.float32, cpu)
    assert buckets is not None and pool.values[0].shape[-1] == 64
    monkeypatch.setattr(TritonPass, "attend", lambda *_: 1 / 0)
    pool, buckets = on_gpu.pool_and_buckets([a_call()], 64, torch.float32, cpu)
    assert buckets is None and pool.values[0].shape[-1] == 65
