"""The target on a tiny model: a token's logits are the same bits alone, in a tree, in a batch, in any chunking."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.verifier.attention.calls import MAX_NODES
from services.verifier.config import Kernels, TargetConfig
from services.verifier.kv_cache.pool import BLOCK
from services.verifier.model import fused_layers
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from speculation.errors import ConfigurationError
from tests.engine.layouts import in_one_process
from tests.kernels.kernels_here import SETS, kernels_of
from tests.running.refusals import refuses
from tests.tiny_models.tiny import make_tiny_model

# One process, since targets and plain decoding are shared, and so that the last test sees what the others gave back.
pytestmark = pytest.mark.xdist_group("target is exact")

# Long enough to cross block borders, and so do the trees.
LENGTH = 200


@pytest.fixture(scope="module", params=[*SETS, "modules", "onednn"], autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """With our own kernels, which need a C compiler, for every instruction set that is here, and without.

    ``modules`` is ours too, in layers that are not computed by one call.
    """
    chosen = request.param
    if chosen != "onednn":
        kernels_of("auto" if chosen == "modules" else chosen)
    with pytest.MonkeyPatch.context() as patch:
        if chosen == "modules":
            patch.setattr(fused_layers, "fuse", lambda *_: (0, "of the test"))
        yield "auto" if chosen == "modules" else chosen


def config_of(model: Path, kernels: Kernels, **settings: Any) -> TargetConfig:
    return TargetConfig(model_path=str(model), kernels=kernels, **settings)


@pytest.fixture(scope="module")
def target(tiny_model: Path, kernels: Kernels, target_layout: str) -> TransformersTarget:
    made = TransformersTarget(config_of(tiny_model, kernels, kv_cache_tokens=2048, max_model_len=512))
    assert kernels in ("auto", made.kernels.linears, made.kernels.instructions)
    return made


@pytest.fixture(scope="module")
def text(target: TransformersTarget) -> list[int]:
    source = random.Random(1)
    return [source.randrange(target.vocab_size) for _ in range(LENGTH)]


@pytest.fixture(scope="module")
def alone(tiny_model: Path, kernels: Kernels, text: list[int]) -> torch.Tensor:
    """Logits of plain decoding in one process, one token per pass: [LENGTH, vocabulary]."""
    with in_one_process():
        target = TransformersTarget(config_of(tiny_model, kernels, kv_cache_tokens=2048, max_model_len=512))
    assert target.open("alone", LENGTH)
    rows = [target.forward([chunk("alone", i, text[i : i + 1])])[0][0] for i in range(LENGTH)]
    target.close("alone")
    return torch.stack(rows)


def chunk(name: str, context: int, tokens: list[int], logits: int = 1) -> Rows:
    return Rows(request_id=name, context=context, tokens=tuple(tokens), logits=logits)


@pytest.mark.examples(3)
def test_plain_decoding_agrees_with_transformers(tiny_model: Path, text: list[int], alone: torch.Tensor) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)(torch.tensor([text])).logits[0]
    assert torch.allclose(alone, reference, atol=2e-4)
    assert torch.equal(alone.argmax(-1), reference.argmax(-1))


def test_features_are_what_the_output_layer_reads(tiny_model: Path, target: TransformersTarget, text: list[int]) -> None:
    """Of two requests in one pass, one with a tree; the rows that are asked for, in their order."""
    head = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).get_output_embeddings()
    for name in ("plain", "tree"):
        assert target.open(name, 40)
    tree = Rows(request_id="tree", context=0, tokens=tuple(text[:9]), parents=(-1, 0, -1, 2), logits=5, layers=(-1,))
    _, logits = target.forward([chunk("plain", 0, text[20:27], 3), tree])
    wanted = [4, 7, 8]
    features = target.features("tree", wanted)
    for name in ("plain", "tree"):
        target.close(name)
    assert (features.rows, features.width, features.dtype) == (3, head.in_features, "float16")
    states = torch.frombuffer(bytearray(features.data), dtype=torch.float16).reshape(3, -1).float()
    # The tree's logits are those of its last five rows: from the chain's end, row 4, on.
    expected = logits[[row - 4 for row in wanted]]
    torch.testing.assert_close(head(states), expected, atol=2e-2, rtol=2e-2)
    assert torch.equal(head(states).argmax(-1), expected.argmax(-1))


@pytest.mark.examples(5)
@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, LENGTH])
def test_any_chunking_of_the_prompt(target: TransformersTarget, text: list[int], alone: torch.Tensor, size: int) -> None:
    assert target.open("chunked", LENGTH)
    rows = []
    for start in range(0, LENGTH, size):
        part = text[start : start + size]
        rows.append(target.forward([chunk("chunked", start, part, len(part))])[0])
    target.close("chunked")
    assert torch.equal(torch.cat(rows), alone)


def test_what_another_thread_makes_the_default_type_changes_nothing(
    target: TransformersTarget, text: list[int], alone: torch.Tensor
) -> None:
    """transformers changes it for the whole process while it makes a model: a drafter's, or new weights, beside passes.

    Buffers of half the size were written beyond their end.
    """
    assert target.open("beside", LENGTH)
    torch.set_default_dtype(torch.bfloat16)
    try:
        rows = target.forward([chunk("beside", 0, text, LENGTH)])[0]
    finally:
        torch.set_default_dtype(torch.float32)
        target.close("beside")
    assert rows.dtype == torch.float32 and torch.equal(rows, alone)


def tree_around(
    text: list[int], start: int, source: random.Random, vocab: int, depth: int = 4
) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents and the nodes of the true continuation, wrong siblings and cousins strewn in."""
    tokens: list[int] = []
    parents: list[int] = []
    path: list[int] = []
    for true in text[start : start + depth]:
        for _ in range(source.randint(0, 2)):
            parents.append(source.randint(-1, len(tokens) - 1))
            tokens.append(source.randrange(vocab))
        parents.append(path[-1] if path else -1)
        path.append(len(tokens))
        tokens.append(true)
    return tokens, parents, path


@pytest.mark.parametrize("scattered", [False, True], ids=["neighbouring blocks", "scattered blocks"])
def test_any_tree_at_any_border(target: TransformersTarget, text: list[int], alone: torch.Tensor, scattered: bool) -> None:
    source = random.Random(2)
    if scattered:
        fragment(target)
    assert target.open("tree", LENGTH + 16)
    blocks = target.pool.blocks_of("tree")
    assert (blocks != list(range(blocks[0], blocks[0] + len(blocks)))) == scattered
    position = 1
    target.forward([chunk("tree", 0, text[:1], 0)])
    while position < LENGTH - 5:
        tokens, parents, path = tree_around(text, position + 1, source, target.vocab_size)
        rows = Rows(
            request_id="tree",
            context=position,
            tokens=(text[position], *tokens),
            parents=tuple(parents),
            logits=1 + len(tokens),
        )
        logits = target.forward([rows])[0]
        expected = alone[position : position + 5]
        assert torch.equal(logits[[0, *(node + 1 for node in path)]], expected), f"at {position}"
        kept = [0, *(node + 1 for node in path[: source.randint(0, 4)])]
        target.keep("tree", position, kept)
        position += len(kept)
    target.close("tree")
    if scattered:
        for index in range(0, FILLS, 2):
            target.close(f"fill{index}")


def test_trees_of_several_requests_in_one_pass(target: TransformersTarget, text: list[int], alone: torch.Tensor) -> None:
    """Groups of other sizes and windows beside each other: stacked, padded, cut at borders."""
    source = random.Random(5)
    # The third crosses two borders of blocks and is as large as a tree may be.
    wanted = {"a": (40, 4), "b": (62, 5), "c": (60, 75), "d": (130, 3), "e": (126, 2)}
    batch, paths = [], []
    for name, (start, depth) in wanted.items():
        assert target.open(name, LENGTH + 130)
        target.forward([chunk(name, 0, text[:start], 0)])
        tokens, parents, path = tree_around(text, start + 1, source, target.vocab_size, depth)
        while depth > 70 and len(tokens) < MAX_NODES:
            parents.append(source.randint(-1, len(tokens) - 1))
            tokens.append(source.randrange(target.vocab_size))
        tokens, parents = tokens[:MAX_NODES], parents[:MAX_NODES]
        paths.append([node for node in path if node < MAX_NODES])
        batch.append(
            Rows(
                request_id=name,
                context=start,
                tokens=(text[start], *tokens),
                parents=tuple(parents),
                logits=1 + len(tokens),
            )
        )
    assert target.open("prompt", LENGTH)
    logits = target.forward([chunk("prompt", 0, text[:100], 100), *batch])
    assert torch.equal(logits[0], alone[:100])
    for result, path, (start, _) in zip(logits[1:], paths, wanted.values(), strict=True):
        assert torch.equal(result[[0, *(node + 1 for node in path)]], alone[start : start + 1 + len(path)]), start
    for name in (*wanted, "prompt"):
        target.close(name)


def test_a_tree_that_is_too_large_is_refused(target: TransformersTarget) -> None:
    assert target.open("a", 200)
    rows = Rows(request_id="a", context=0, tokens=(1,) * (MAX_NODES + 2), parents=(-1,) * (MAX_NODES + 1), logits=1)
    with pytest.raises(ValueError, match="at most 128"):
        target.forward([rows])
    target.close("a")


FILLS = 17


def fragment(target: TransformersTarget) -> None:
    """Leave only holes that are too small for a whole request side by side."""
    blocks = target.blocks.total
    share = blocks // FILLS
    assert share * BLOCK < LENGTH
    for index in range(FILLS):
        assert target.open(f"fill{index}", (share if index < FILLS - 1 else blocks - (FILLS - 1) * share) * BLOCK)
    for index in range(1, FILLS, 2):
        target.close(f"fill{index}")


def test_other_requests_in_the_batch(target: TransformersTarget, text: list[int], alone: torch.Tensor) -> None:
    for name in ("a", "b", "c"):
        assert target.open(name, LENGTH)
    target.forward([chunk("a", 0, text[:90], 0), chunk("b", 0, text[:30], 0)])
    batch = [chunk("c", 0, text[:70], 70), chunk("a", 90, text[90:91]), chunk("b", 30, text[30:40], 10)]
    third, first, second = target.forward(batch)
    assert torch.equal(third, alone[:70])
    assert torch.equal(first, alone[90:91])
    assert torch.equal(second, alone[30:40])
    for name in ("a", "b", "c"):
        target.close(name)


@pytest.mark.exhaustive
def test_far_into_a_long_text(tmp_path: Path, kernels: Kernels) -> None:
    """Beyond what one block of a matrix kernel covers."""
    folder = make_tiny_model(tmp_path, max_position_embeddings=4096)
    target = TransformersTarget(config_of(folder, kernels, kv_cache_tokens=8192))
    source, length = random.Random(4), 3000
    text = [source.randrange(target.vocab_size) for _ in range(length)]
    for name in ("alone", "chunked"):
        assert target.open(name, length + 16)
    one = torch.stack([target.forward([chunk("alone", i, text[i : i + 1])])[0][0] for i in range(length)])
    for start in range(0, length, 250):
        part = target.forward([chunk("chunked", start, text[start : start + 250], 250)])[0]
        assert torch.equal(part, one[start : start + 250]), start
    for start in (600, 1500, 2046, 2990):
        tokens, parents, path = tree_around(text, start + 1, source, target.vocab_size)
        rows = Rows(
            request_id="chunked",
            context=start,
            tokens=(text[start], *tokens),
            parents=tuple(parents),
            logits=1 + len(tokens),
        )
        assert torch.equal(target.forward([rows])[0][[0, *(node + 1 for node in path)]], one[start : start + 5])
        target.forward([chunk("chunked", start, text[start : start + 10], 0)])


def test_everything_is_given_back(target: TransformersTarget) -> None:
    assert target.blocks.available == target.blocks.total


def test_sliding_window(tmp_path: Path, kernels: Kernels) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    folder = make_tiny_model(tmp_path)
    torch.manual_seed(1)
    config = MistralConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, sliding_window=24, initializer_range=0.4, eos_token_id=0,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    model.save_pretrained(folder)
    target = TransformersTarget(config_of(folder, kernels, kv_cache_tokens=1024))
    source = random.Random(3)
    text = [source.randrange(300) for _ in range(150)]
    target.open("a", 200)
    logits = target.forward([chunk("a", 0, text, 150)])[0]
    with torch.no_grad():
        reference = model(torch.tensor([text])).logits[0]
    assert torch.allclose(logits, reference, atol=2e-4)
    assert torch.equal(target.forward([chunk("a", 149, text[149:])])[0][0], logits[149])
    for start in (60, 125, 140):
        tokens, parents, path = tree_around(text, start + 1, source, 300)
        nodes = (text[start], *tokens)
        rows = Rows(request_id="a", context=start, tokens=nodes, parents=tuple(parents), logits=len(nodes))
        checked = target.forward([rows])[0][[0, *(node + 1 for node in path)]]
        assert torch.equal(checked, logits[start : start + 5]), start
        target.forward([chunk("a", start, text[start : start + 10], 0)])


def test_models_that_cannot_be_served_are_refused_at_start(tmp_path: Path) -> None:
    with refuses(ConfigurationError, field="config.json"):
        TransformersTarget(TargetConfig(model_path=str(tmp_path)))
    folder = make_tiny_model(tmp_path / "m")
    with refuses(ConfigurationError, field="verifier.max_model_len", value=9999):
        TransformersTarget(TargetConfig(model_path=str(folder), max_model_len=9999))
    with refuses(ConfigurationError, field="verifier.max_model_len", value=512):
        TransformersTarget(TargetConfig(model_path=str(folder), max_model_len=512, kv_cache_tokens=128))
    with refuses(ConfigurationError, field="verifier.device", value="cuda"):
        TransformersTarget(TargetConfig(model_path=str(folder), device="cuda"))
