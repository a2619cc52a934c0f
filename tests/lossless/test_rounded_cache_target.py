"""A target that keeps keys and values in eight bits: plain decoding, chunks, trees, kept prefixes, stages and ranks agree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from services.verifier.config import Dtype, Kernels, TargetConfig, check_backends
from services.verifier.kv_cache.pool import BLOCK, KVPool
from services.verifier.loading.model_size import shape_of
from services.verifier.model.slice import ModelSlice
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Prefix, Rows
from services.verifier.service import arithmetic_of
from speculation.errors import ConfigurationError
from tests.engine.stage_threads import launch_thread
from tests.engine.virtual_ranks import ranks_of, together
from tests.kernels.kernels_here import needs_kernels
from tests.lossless.test_tensor_parallel import SIZES, config, passes
from tests.running.refusals import refuses
from tests.tiny_models.attention_models import ARCHITECTURES, make_architecture
from tests.tiny_models.tiny import make_tiny_model

pytestmark = [
    needs_kernels,
    pytest.mark.xdist_group("stages"),
]
TEXT = tuple(range(5, 95))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), **SIZES)


def rounded(model: Path, ranks: int = 1, **options: Any) -> TargetConfig:
    return config(model, ranks, kv_cache_dtype="fp8", **options)


def rows(context: int, tokens: Sequence[int], parents: Sequence[int] = (), logits: int = 1, name: str = "a") -> Rows:
    return Rows(request_id=name, context=context, tokens=tuple(tokens), parents=tuple(parents), logits=logits)


def one_by_one(target: TransformersTarget, tokens: Sequence[int]) -> torch.Tensor:
    """The logits after each token, decoded alone."""
    assert target.open("plain", len(tokens) + 8)
    made = []
    for at, token in enumerate(tokens):
        made += target.forward([rows(at, (token,), name="plain")])
        target.keep("plain", at, [0])
    target.close("plain")
    return torch.cat(made)


@pytest.fixture(scope="module")
def plain(model: Path) -> torch.Tensor:
    """Of ``TEXT``, by plain decoding."""
    return one_by_one(TransformersTarget(rounded(model)), TEXT)


def drafted(target: TransformersTarget, wanted: torch.Tensor) -> None:
    """In chunks, by trees of which a part is kept, and from a kept prefix, beside another request."""
    prefix = Prefix(tokens=TEXT, tenant="one")
    for turn in range(2):
        assert target.open("a", 200, prefix) and target.open("other", 100)
        begin = target.computed("a")
        assert begin == (0, BLOCK)[turn]
        for first, end in ((0, 30), (30, 60), (60, 70)):
            if end <= begin:
                continue
            first = max(first, begin)
            found, _ = target.forward([rows(first, TEXT[first:end]), rows(0, (3, 4, 5), name="other")])
            assert torch.equal(found[-1], wanted[end - 1])
            target.keep("a", first, range(end - first))
        # Of each two nodes one goes on as the text does, and the tree crosses a border of blocks in the second turn.
        for at in range(70, 88, 6):
            own = [TEXT[at + 1 + depth] for depth in range(5)]
            tree = [token for each in own for token in (each + 100, each)]
            parents = [-1, -1] + [2 * depth - 1 for depth in range(1, 5) for _ in range(2)]
            (found,) = target.forward([rows(at, (TEXT[at], *tree), parents, 11)])
            right = [0, *range(2, 11, 2)]
            assert torch.equal(found[right], wanted[at : at + 6])
            target.keep("a", at, right)
        target.close("a")
        target.close("other")


def test_trees_chunks_and_prefixes_are_plain_decodings(model: Path, plain: torch.Tensor) -> None:
    target = TransformersTarget(rounded(model))
    assert target.exact and target.pool.rounded
    drafted(target, plain)
    # It is another model than the one whose cache is not rounded, and near it.
    other = one_by_one(TransformersTarget(config(model)), TEXT)
    assert not torch.equal(plain, other)
    assert float(torch.corrcoef(torch.stack([plain.flatten(), other.flatten()]))[0, 1]) > 0.9


@pytest.mark.parametrize(("ranks", "stages"), [(1, 2), (2, 1), pytest.param(2, 2, marks=pytest.mark.exhaustive)])
def test_ranks_and_stages_have_the_same_bits(model: Path, plain: torch.Tensor, ranks: int, stages: int) -> None:
    target = TransformersTarget(rounded(model, ranks, stages=stages), launch_thread)
    try:
        drafted(target, plain)
    finally:
        target.shutdown()


def test_four_ranks_have_the_same_bits(model: Path) -> None:
    def of(part: ModelSlice) -> torch.Tensor:
        part.round_cache()
        return passes(part)

    whole = of(ModelSlice(rounded(model), 0))
    assert all(torch.equal(made, whole) for made in together(ranks_of(rounded(model, 4)), of))


@pytest.mark.parametrize("fault", ["scales stay behind", "scales of the one before"])
def test_a_planted_fault_is_seen(model: Path, plain: torch.Tensor, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = KVPool._make

    def without(self: KVPool, blocks: int) -> None:
        make(self, blocks)
        if self.rounded and fault == "scales stay behind":
            self._alike = [pair for pair in self._alike if pair[0].dtype == torch.uint8]
        elif self.rounded:
            self.value_scales = self.key_scales[1:] + self.key_scales[:1]

    monkeypatch.setattr(KVPool, "_make", without)
    with pytest.raises((AssertionError, ConfigurationError)):
        drafted(TransformersTarget(rounded(model)), plain)


@pytest.mark.examples(6)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_other_attention(kind: str, tmp_path: Path) -> None:
    """Windows, sinks, caps and biases: what is served is what plain decoding makes, and memory as it is reckoned."""
    make_architecture(tmp_path, kind)
    own = TargetConfig(
        model_path=str(tmp_path), kv_cache_tokens=1024, max_model_len=400, kv_cache_dtype="fp8_e4m3", threads=1
    )
    try:
        target = TransformersTarget(own)
    except ConfigurationError as error:
        if error.field != "verifier.kv_cache_dtype":
            raise
        pytest.skip("its attention is not computed by our kernel")
    pool = target.pool
    held = sum(each.nbytes for each in (*pool.keys, *pool.values, *pool.key_scales, *pool.value_scales))
    each = shape_of(own).cache(own) / own.cache_tokens
    assert each == held / BLOCK / (pool.total_blocks + 1)
    assert target.exact
    tokens = [token % target.vocab_size for token in TEXT[:70]]
    wanted = one_by_one(target, tokens)
    assert target.open("a", 100)
    (found,) = target.forward([rows(0, tokens)])
    assert torch.equal(found[-1], wanted[-1])


def test_the_card_says_it_and_no_answer_moves_to_other_bits(model: Path) -> None:
    arithmetic = set()
    for own, said in ((config(model), ""), (rounded(model), "floats of 8 bits with a scale for each row and head")):
        target = TransformersTarget(own)
        one_by_one(target, (1, 2))
        assert target.weights.rounded_cache == said
        arithmetic.add(arithmetic_of(target, own, ""))
    assert len(arithmetic) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"device": "cuda"},
        {"device": "cuda", "dtype": "bfloat16", "attention_backend": "torch"},
        {"dtype": "bfloat16"},
        {"kernels": "torch"},
        {"kernels": "onednn"},
        {"attention_backend": "torch"},
    ],
    ids=str,
)
def test_where_it_is_not_served_it_is_refused(options: dict[str, Any]) -> None:
    with refuses(ConfigurationError, field="verifier.kv_cache_dtype", value="fp8"):
        check_backends(TargetConfig(model_path="", kv_cache_dtype="fp8", **options))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("kernels", ["auto", "triton", "cublaslt", "torch"])
def test_where_it_is_served(dtype: Dtype, kernels: Kernels) -> None:
    check_backends(TargetConfig(model_path="", kv_cache_dtype="fp8", device="cuda", dtype=dtype, kernels=kernels))
    check_backends(TargetConfig(model_path="", kv_cache_dtype="fp8", dtype="int8"))
