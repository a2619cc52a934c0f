"""What a machine cannot do is refused before weights are read, with what it could do."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.verifier.attention.calls import Call
from services.verifier.attention.fixed import largest_pass
from services.verifier.config import TargetConfig
from services.verifier.kernels.cpu_choice import choose_kernels
from services.verifier.kernels.native.library import library
from services.verifier.kernels.triton.pass_shape import summed
from services.verifier.kv_cache.pool import KVPool
from services.verifier.loading.load_model import load_whole
from services.verifier.loading.memory import (
    Shape,
    available_bytes,
    buffer_bytes,
    check_fits,
    graph_bytes,
    needed,
    sums_bytes,
    with_cache_of,
)
from services.verifier.loading.model_config import load_dtype
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses

GIB = 2**30
# 10 layers of 1 GiB each in float32, 1 GiB besides, and a cache of 64 KiB a token.
SHAPE = Shape(layers=10, per_layer=GIB // 4, others=GIB // 4, embeddings=0, stored_bytes=2, cache_values_per_token=2**14)
CONFIG = TargetConfig(model_path="", kv_cache_tokens=65536)


def test_a_model_that_fits() -> None:
    check_fits(CONFIG, SHAPE, 15.1 * GIB)
    check_fits(replace(CONFIG, stages=5), SHAPE, 4 * GIB)


@pytest.mark.parametrize(
    ("free", "refusal"),
    [
        (
            14.0,
            (
                "model",
                None,
                "fit: verifier.kv_cache_tokens: 32768; verifier.dtype: bfloat16; verifier.dtype: int8; verifier.s",
            ),
        ),
        (8.0, ("model", None, "verifier.dtype: bfloat16; verifier.stages: 2, on other machines or GPUs")),
        (4.0, ("model", None, "verifier.stages: 5, on other machines or GPUs")),
        (1.0, ("model", None, "no one of verifier.dtype, stages and kv_cache_tokens helps alone")),
    ],
)
def test_one_that_does_not(free: float, refusal: tuple[object, ...]) -> None:
    with refuses(ConfigurationError, *refusal) as caught:
        check_fits(CONFIG, SHAPE, free * GIB)
    assert "11.0 GiB of weights (float32) and 4.0 GiB of cache (verifier.kv_cache_tokens: 65536)" in str(caught.value)
    assert f"{free:.1f} GiB are free" in str(caught.value)


def test_the_whole_way(tiny_model: Path) -> None:
    huge = TargetConfig(model_path=str(tiny_model), kv_cache_tokens=10**12, max_model_len=512)
    with refuses(ConfigurationError, field="model"):
        TransformersTarget(huge)


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda", "cuda:7"])
def test_devices_that_are_not_there(tiny_model: Path, device: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with refuses(ConfigurationError, "verifier.device", device):
        TransformersTarget(TargetConfig(model_path=str(tiny_model), device=device))


def test_a_driver_that_is_too_old_is_told(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old (found version 11040).", stacklevel=1)
        return False

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    with refuses(ConfigurationError, field="verifier.device", value="cuda"):
        TransformersTarget(TargetConfig(model_path=str(tiny_model), device="cuda"))


def test_int8_needs_the_kernels(tiny_model: Path) -> None:
    config = TargetConfig(model_path=str(tiny_model), dtype="int8")
    with refuses(ConfigurationError, field="verifier.dtype", value="int8"):
        choose_kernels(load_whole(config), config, find=lambda name: None)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_other_dtypes_are_close_to_float32(tiny_model: Path, dtype: str) -> None:
    if dtype == "int8" and library() is None:
        pytest.skip("no C compiler here")
    text = tuple(range(5, 65))
    made = []
    for name in ("float32", dtype):
        target = TransformersTarget(
            TargetConfig(model_path=str(tiny_model), kv_cache_tokens=512, dtype=name)  # type: ignore[arg-type]
        )
        target.open("a", 100)
        made.append(target.forward([Rows(request_id="a", context=0, tokens=text, logits=60)])[0])
    error = (made[0] - made[1]).std() / made[0].std()
    assert 0 < error < 0.1
    if dtype == "int8":
        # One token after the other, and all at once: the same bits, as in float32.
        target.open("b", 100)
        for at, token in enumerate(text[:20]):
            alone = target.forward([Rows(request_id="b", context=at, tokens=(token,), logits=1)])[0]
            assert torch.equal(alone[0], made[1][at])


def test_captured_passes_take_memory_on_a_gpu() -> None:
    on_gpu = replace(CONFIG, device="cuda", dtype="bfloat16")
    # A model of whose heads nothing is known may have 1 GiB of sums of segments.
    # 19 numbers of rows from 1 to 256, segments apart and not, narrow and wide: 76 graphs of 10 layers.
    assert graph_bytes(on_gpu, SHAPE) == 1.5 * GIB + 76 * 10 * 2**18
    assert graph_bytes(replace(on_gpu, observed_layers=(-1,), stages=2), SHAPE) == 1.5 * GIB + 152 * 5 * 2**18
    assert graph_bytes(replace(on_gpu, pass_rows=9999), SHAPE) == 1.5 * GIB + 27 * 4 * 10 * 2**18
    # Within one segment none is apart.
    assert graph_bytes(replace(on_gpu, max_model_len=256), SHAPE) == 0.5 * GIB + 38 * 10 * 2**18
    assert graph_bytes(CONFIG, SHAPE) == graph_bytes(replace(on_gpu, dtype="float32"), SHAPE) == 0
    with refuses(ConfigurationError, field="model"):
        check_fits(on_gpu, SHAPE, 8.5 * GIB)


def test_sums_of_segments_take_as_much_as_the_largest_pass_needs() -> None:
    """Up to 1 GiB: what the kernels ask for; a rank has its heads alone, and torch's attention none."""
    pytest.importorskip("triton")
    from services.verifier.kernels.triton.tree_pass import TritonBuckets

    config = replace(CONFIG, device="cuda", dtype="bfloat16", max_model_len=8192, pass_rows=100)
    call = Call(entry=0, heads=32, kv_heads=8, key_size=128, value_size=128, scale=0.1)
    shape = replace(SHAPE, summed=32 * 130)
    # 100 rows are captured as 112, behind at most 8192 tokens and a tree: 17 segments.
    assert sums_bytes(config, shape) == 112 * 17 * 32 * 130 * 4
    pool = KVPool([call], rows=64, dtype=torch.bfloat16, device=torch.device("cpu"), whole_rows=True)
    largest = max(TritonBuckets(pool).allowed(largest_pass(config)), key=lambda found: found.parts)
    assert largest.parts * summed(call) * 4 == sums_bytes(config, shape)
    assert sums_bytes(replace(config, tensor_parallel_size=4), shape) == 112 * 17 * 8 * 130 * 4
    assert sums_bytes(replace(config, pass_rows=512, max_model_len=None), shape) == GIB
    assert (
        graph_bytes(config, shape) - graph_bytes(replace(config, attention_backend="torch"), shape)
        == 112 * 17 * 32 * 130 * 4
    )
    assert sums_bytes(replace(config, max_model_len=384), shape) == sums_bytes(CONFIG, shape) == 0


def test_int8_on_a_gpu_is_made_of_the_type_that_is_computed_in(tiny_model: Path) -> None:
    """Whatever type the model is stored in; on a CPU our kernels read the stored numbers."""
    config = TargetConfig(model_path=str(tiny_model), dtype="int8")
    assert load_dtype(config) == torch.float32
    assert load_dtype(replace(config, device="cuda:1")) == torch.bfloat16
    assert load_dtype(replace(config, dtype="bfloat16")) == torch.bfloat16


def test_a_gpu_says_how_many_tokens_its_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as fit beside all else into its share, of which others may have taken some."""
    shape = replace(SHAPE, vocabulary=2**17, longest=4096)
    config = TargetConfig(model_path="", device="cuda", dtype="bfloat16")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    # 10 GiB are taken, and 8 are not its share.
    assert available_bytes(config) == pytest.approx(62 * GIB)
    assert available_bytes(replace(config, kv_cache_tokens=64)) == 70 * GIB
    found = with_cache_of(config, shape, 62 * GIB)
    assert found.cache_tokens % 64 == 0 and found.max_model_len is None
    full = replace(found, max_model_len=4096)
    block = shape.cache(replace(full, kv_cache_tokens=64))
    assert 0 <= 62 * GIB - needed(full, shape) < block
    assert needed(full, shape) == sum(
        part(full)
        for part in (shape.weights, shape.cache, lambda own: graph_bytes(own, shape), lambda own: buffer_bytes(own, shape))
    )
    # In eight bits with two scales for each row of a head: nearly twice as many.
    rows = replace(shape, cache_rows_per_token=SHAPE.cache_values_per_token // 257)
    assert 1.9 < with_cache_of(replace(config, kv_cache_dtype="fp8"), rows, 62 * GIB).cache_tokens / found.cache_tokens < 2
    # A setting goes before it, and the CPU's number does not depend on memory.
    assert with_cache_of(replace(config, kv_cache_tokens=128), shape, 62 * GIB).cache_tokens == 128
    assert with_cache_of(replace(config, device="cpu"), shape, 62 * GIB).cache_tokens == 16384
    assert with_cache_of(config, replace(shape, cache_values_per_token=0), 62 * GIB, least=512).cache_tokens == 512
    with refuses(ConfigurationError, "model", None, "dtype: int8"):
        with_cache_of(config, shape, 6 * GIB)
    with refuses(ConfigurationError, "model", None, "(verifier.kv_cache_tokens: 2000000)"):
        with_cache_of(config, shape, 62 * GIB, least=2_000_000)


def test_hidden_states_kept_for_drafters_on_a_gpu_are_counted() -> None:
    """The cache gets what they leave; where they are copied to the host, all of it."""
    shape = replace(SHAPE, vocabulary=2**17, longest=4096)
    config = TargetConfig(model_path="", device="cuda", dtype="bfloat16", states_stay=True, kept_state_bytes=3 * GIB)
    plain = replace(config, states_stay=False)
    beside, alone = (with_cache_of(each, shape, 62 * GIB) for each in (config, plain))
    block = shape.cache(replace(alone, kv_cache_tokens=64))
    assert abs(shape.cache(alone) - shape.cache(beside) - 3 * GIB) <= block
    assert needed(beside, shape) - needed(replace(beside, states_stay=False), shape) == 3 * GIB
    for elsewhere in (replace(config, device="cpu"), replace(config, stages=2), replace(config, tensor_parallel_size=2)):
        assert needed(elsewhere, shape) == needed(replace(elsewhere, states_stay=False), shape)
    with refuses(ConfigurationError, "model", None, "3.0 GiB of hidden states for drafters"):
        with_cache_of(replace(config, kv_cache_tokens=64), shape, 3 * GIB)


def test_what_comes_and_goes_on_a_gpu_is_counted() -> None:
    """Logits of the largest pass in two types, or trials of kernels where they take more; NCCL's buffers beside others."""
    shape, config = (
        replace(SHAPE, vocabulary=1000),
        TargetConfig(model_path="", device="cuda", dtype="bfloat16", pass_rows=100),
    )
    assert buffer_bytes(config, shape) == 100 * 1000 * (2 + 4)
    assert buffer_bytes(replace(config, stages=2), shape) - buffer_bytes(config, shape) == GIB / 2
    wide = replace(shape, embeddings=GIB)
    assert buffer_bytes(config, wide) == 2 * GIB - wide.cache(config)
    assert buffer_bytes(replace(config, kernels="torch"), wide) == 100 * 1000 * (2 + 4)
    # Rounded weights, of a byte, lie beside those that they are rounded from.
    assert buffer_bytes(replace(config, dtype="fp8"), wide) == 3 * GIB - wide.cache(config)
    assert buffer_bytes(replace(config, device="cpu", dtype="float32"), wide) == 0
