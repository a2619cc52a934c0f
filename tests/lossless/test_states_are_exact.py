"""Layers with a state: a token's logits are the same bits alone, in any chunking, in a tree, after a tree, beside others.

What would go wrong without a sound is planted, and must be seen.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typing_extensions import override

from services.verifier.config import TargetConfig
from services.verifier.loading.model_size import shape_of
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from services.verifier.recurrence import gated_scan, keyed_states
from services.verifier.recurrence.keyed_states import written
from services.verifier.recurrence.order import Order
from services.verifier.recurrence.state_pool import StatePool
from services.verifier.recurrence.walks import FROM_STATE
from speculation.errors import ConfigurationError, Internal
from tests.lossless.hybrids import DECAYING, KINDS, chain, close_all, make_hybrid, plainly, random_text
from tests.running.refusals import refuses

pytestmark = pytest.mark.xdist_group("hybrids")

LENGTH = 100


def config_of(folder: Path, **settings: object) -> TargetConfig:
    return TargetConfig(model_path=str(folder), kv_cache_tokens=1024, max_model_len=256, threads=1, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hybrid(request.param, tmp_path_factory.mktemp("hybrids") / request.param)


@pytest.fixture(scope="module")
def target(folder: Path) -> TransformersTarget:
    made = TransformersTarget(config_of(folder))
    assert made.exact
    return made


@pytest.fixture
def opened(target: TransformersTarget) -> Iterator[TransformersTarget]:
    """Nothing is open before a test, nor after it."""
    assert not target.blocks.owners
    yield target
    close_all(target)


@pytest.fixture(scope="module")
def text(target: TransformersTarget) -> list[int]:
    return random_text(target, LENGTH)


@pytest.fixture(scope="module")
def alone(target: TransformersTarget, text: list[int]) -> torch.Tensor:
    return plainly(target, text)


@pytest.mark.parametrize("size", [2, 7, 64, LENGTH])
def test_any_chunking_of_the_prompt(opened: TransformersTarget, text: list[int], alone: torch.Tensor, size: int) -> None:
    opened.open("chunks", LENGTH)
    chunks = [opened.forward([chain("chunks", at, text[at : at + size])])[0] for at in range(0, LENGTH, size)]
    assert torch.equal(torch.cat(chunks), alone)


def test_other_requests_in_the_batch(opened: TransformersTarget, text: list[int], alone: torch.Tensor) -> None:
    for name in "abc":
        opened.open(name, LENGTH)
    opened.forward([chain("a", 0, text[:90]), chain("b", 0, text[:30])])
    third, first, second = opened.forward(
        [chain("c", 0, text[:70]), chain("a", 90, text[90:91]), chain("b", 30, text[30:40])]
    )
    assert torch.equal(third, alone[:70])
    assert torch.equal(first, alone[90:91])
    assert torch.equal(second, alone[30:40])


def tree_at(text: list[int], at: int, source: random.Random, vocab: int) -> tuple[Rows, list[int]]:
    """The token at ``at`` and a tree of its four successors among wrong siblings and cousins; the rows of these five."""
    tokens: list[int] = []
    parents: list[int] = []
    path = [-1]
    for right in text[at + 1 : at + 5]:
        for _ in range(source.randint(0, 2)):
            parents.append(source.randint(-1, len(tokens) - 1))
            tokens.append(source.randrange(vocab))
        parents.append(path[-1])
        path.append(len(tokens))
        tokens.append(right)
    rows = Rows(request_id="tree", context=at, tokens=(text[at], *tokens), parents=tuple(parents), logits=1 + len(tokens))
    return rows, [1 + node for node in path]


def same_in_trees(target: TransformersTarget, text: list[int], alone: torch.Tensor) -> bool:
    """Whether trees all along the text, of which some nodes are kept, have the bits of plain decoding."""
    source, at = random.Random(2), 3
    target.open("tree", LENGTH + 16)
    target.open("beside", LENGTH)
    target.forward([chain("tree", 0, text[:at])])
    same, passes = True, 0
    while same and at < LENGTH - 5:
        rows, path = tree_at(text, at, source, target.vocab_size)
        beside, made = target.forward([chain("beside", passes, text[passes : passes + 1]), rows])
        same &= torch.equal(made[path], alone[at : at + 5]) and torch.equal(beside, alone[passes : passes + 1])
        kept = path[: source.randint(1, 5)]
        target.keep("tree", at, kept)
        at += len(kept)
        passes += 1
    target.close("tree")
    target.close("beside")
    return same


def test_trees_and_what_is_kept_of_them(opened: TransformersTarget, text: list[int], alone: torch.Tensor) -> None:
    assert same_in_trees(opened, text, alone)


def test_a_text_goes_on_after_a_tree_in_chunks(opened: TransformersTarget, text: list[int], alone: torch.Tensor) -> None:
    opened.open("tree", LENGTH)
    opened.forward([chain("tree", 0, text[:20])])
    rows, path = tree_at(text, 20, random.Random(3), opened.vocab_size)
    opened.forward([rows])
    opened.keep("tree", 20, path[:4])
    assert torch.equal(opened.forward([chain("tree", 24, text[24:60])])[0], alone[24:60])


class _SiblingsState(Order):
    """A node steps from the row before it, whosever child it is."""

    @property
    @override
    def parents(self) -> list[tuple[int, int, int]]:
        right = {row: (parent, request) for row, parent, request in Order.parents.func(self)}  # type: ignore[attr-defined]
        return [
            (row, parent if parent == FROM_STATE or right.get(row - 1, (0, -1))[1] != request else row - 1, request)
            for row, (parent, request) in right.items()
        ]


class _ShiftedWindow(Order):
    """A row sees the inputs that the row before it should see."""

    @override
    def windows(self, size: int) -> torch.Tensor:
        return super().windows(size).roll(1, dims=0)


def _one_step_too_many(pool: StatePool, owner: str, context: int, rows: list[int]) -> None:
    _keep(pool, owner, context, rows)
    held = pool._held[owner]
    if held.accepted:
        held.accepted = [*held.accepted, held.accepted[-1]]
        held.length -= 1


_keep = StatePool.keep


@pytest.fixture(params=[_SiblingsState, _ShiftedWindow, _one_step_too_many], ids=lambda fault: fault.__name__)
def fault(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is _ShiftedWindow and folder.name == "minimax":
        pytest.skip("it has no convolution")
    if isinstance(request.param, type):
        monkeypatch.setattr("services.verifier.recurrence.state_pool.Order", request.param)
    else:
        monkeypatch.setattr(StatePool, "keep", request.param)


@pytest.mark.usefixtures("fault")
def test_planted_faults_are_seen_here(opened: TransformersTarget, text: list[int], alone: torch.Tensor) -> None:
    assert not same_in_trees(opened, text, alone)


def _decayed_last(state: torch.Tensor, factors: torch.Tensor, *given: Any) -> torch.Tensor:
    return factors * written(state, torch.ones_like(factors), *given)


def _decayed_last_too(state: torch.Tensor, factors: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    return (state + added) * factors


@pytest.mark.parametrize("kind", ["qwen3_next", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in DECAYING)])
def test_decays_after_instead_of_before_are_refused_at_every_start(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_hybrid(kind, tmp_path / kind)
    monkeypatch.setattr(keyed_states, "written", _decayed_last)
    monkeypatch.setattr(gated_scan, "decayed", _decayed_last_too)
    with refuses(ConfigurationError, says="it computes something else than its own eager attention"):
        TransformersTarget(config_of(folder, kernels="torch"))


@pytest.mark.usefixtures("fault")
def test_planted_faults_are_refused_at_every_start(folder: Path) -> None:
    with refuses(ConfigurationError, says="it computes something else than its own eager attention"):
        TransformersTarget(config_of(folder))


def test_a_state_that_stands_elsewhere_is_not_used(opened: TransformersTarget, text: list[int]) -> None:
    opened.open("a", LENGTH)
    opened.forward([chain("a", 0, text[:8])])
    with pytest.raises(Internal, match="of 8 tokens, and its rows begin after 5"):
        opened.forward([chain("a", 5, text[5:6])])


def test_states_limit_how_many_requests_are_open(folder: Path, text: list[int], alone: torch.Tensor) -> None:
    target = TransformersTarget(config_of(folder, pass_requests=4))
    assert [target.open(name, 64) for name in "abcde"] == [True] * 4 + [False]
    target.forward([chain("b", 0, text[9:20])])
    target.close("b")
    assert target.open("e", 64)
    # The slot of one that is gone holds nothing of it.
    assert torch.equal(target.forward([chain("e", 0, text[:40])])[0], alone[:40])


def test_memory_counts_states(folder: Path, target: TransformersTarget) -> None:
    shape = shape_of(config_of(folder))
    states = target._part.states
    assert states is not None
    assert shape.state_values_per_request == sum(one[0].numel() for one in states.states) > 0
    slots = len(states.states[0])
    assert shape.states(config_of(folder)) == slots * 4 * shape.state_values_per_request
    # Of 1024 tokens of the cache, a state is kept every 512, and every 128.
    sizes = [config_of(folder, pass_requests=7, mamba_block_size=every) for every in (512, 128)]
    assert [shape.states(size) for size in sizes] == [each * 4 * shape.state_values_per_request for each in (9, 15)]
    assert (
        shape.states(config_of(folder, pass_requests=7, enable_prefix_caching=False)) == 28 * shape.state_values_per_request
    )


def test_weights_of_rwkv_are_divided_as_they_are_stored(tmp_path: Path) -> None:
    folder = make_hybrid("rwkv", tmp_path / "rwkv")
    file = next(folder.glob("*.safetensors"))
    save_file({name: weight.bfloat16() for name, weight in load_file(file).items()}, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    target = TransformersTarget(config_of(folder))
    target.open("a", 20)
    tokens = list(range(3, 20))
    right = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(target.forward([chain("a", 0, tokens)])[0], right.detach(), atol=1e-3, rtol=1e-3)


def changed(folder: Path, copy: Path, weight: str, to: torch.Tensor | None) -> Path:
    """A copy of a model with one weight replaced, or left out."""
    copy.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".safetensors":
            weights = load_file(file)
            del weights[weight]
            if to is not None:
                weights[weight] = to
            save_file(weights, copy / file.name, {"format": "pt"})
        else:
            (copy / file.name).write_bytes(file.read_bytes())
    return copy


# Of what states are made of: the filters of convolutions, and decays.
_WEIGHTS = [("lfm2", ".conv.conv.weight"), ("qwen3_next", ".conv1d.weight"), ("qwen3_next", ".A_log"), ("jamba", ".A_log")]
_MORE_WEIGHTS = [("bamba", ".dt_bias"), ("kimi_linear", ".A_log"), ("kimi_linear", ".dt_bias")]


@pytest.mark.parametrize(
    ("kind", "ending"), [*_WEIGHTS, *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in _MORE_WEIGHTS)]
)
def test_missing_and_misshapen_weights_are_refused_by_name(kind: str, ending: str, tmp_path: Path) -> None:
    folder = make_hybrid(kind, tmp_path / kind)
    weights = load_file(next(folder.glob("*.safetensors")))
    name = min(name for name in weights if name.endswith(ending))
    with refuses(ConfigurationError, says=ending):
        TransformersTarget(config_of(changed(folder, tmp_path / "missing", name, None)))
    longer = torch.cat([weights[name], weights[name]], dim=-1)
    with refuses(ConfigurationError, says=ending):
        TransformersTarget(config_of(changed(folder, tmp_path / "longer", name, longer)))


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("lfm2", "conv_L_cache", 0),
        ("lfm2", "conv_L_cache", "3"),
        ("lfm2", "layer_types", ["conv", "retention"] * 2),
        ("qwen3_next", "linear_key_head_dim", 0),
        ("qwen3_next", "linear_conv_kernel_dim", "4"),
        ("qwen3_next", "linear_num_value_heads", 3),
        ("jamba", "mamba_d_state", -1),
    ],
)
def test_wrong_settings_are_refused_by_name(tmp_path: Path, model_type: str, field: str, value: object) -> None:
    folder = with_setting(model_type, tmp_path / "model", field, value)
    with refuses(ConfigurationError, says=field if field != "layer_types" else "retention"):
        TransformersTarget(config_of(folder))


@pytest.mark.parametrize(
    ("model_type", "field", "value", "weight"),
    [
        ("qwen3_next", "linear_key_head_dim", 32, "linear_attn.conv1d.weight"),
        ("qwen3_next", "linear_value_head_dim", 8, "linear_attn.conv1d.weight"),
        ("bamba", "mamba_d_state", 32, "mamba."),
    ],
)
def test_sizes_of_states_that_contradict_the_weights_are_refused(
    tmp_path: Path, model_type: str, field: str, value: int, weight: str
) -> None:
    folder = with_setting(model_type, tmp_path / "model", field, value)
    with refuses(ConfigurationError, says=weight):
        TransformersTarget(config_of(folder))


@pytest.mark.examples(3)
@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        # Too few and too many names.
        ("lfm2", "layer_types", ["conv"] * 3),
        ("qwen3_next", "layer_types", ["linear_attention"] * 5),
        ("zamba", "layer_types", ["linear_attention"] * 3),
        # Kinds that the weights are not of.
        ("lfm2", "layer_types", ["full_attention", "conv"] * 2),
        ("nemotron_h", "layers_block_type", ["attention"] * 4),
        ("nemotron_h", "hybrid_override_pattern", "M-*-"),
        ("nemotron_h", "hybrid_override_pattern", "MX*-"),
        ("nemotron_h", "hybrid_override_pattern", "M*"),
        ("recurrent_gemma", "block_types", ["attention", "recurrent"]),
        ("recurrent_gemma", "block_types", ["retention"]),
        # Where attention is.
        ("jamba", "attn_layer_offset", 0),
        ("jamba", "attn_layer_offset", 5),
        ("jamba", "attn_layer_offset", "1"),
        ("jamba", "attn_layer_period", 0),
        ("bamba", "attn_layer_indices", [0]),
        ("bamba", "attn_layer_indices", [9]),
    ],
    ids=str,
)
def test_layers_in_an_order_that_the_weights_do_not_have_are_refused_by_the_field(
    tmp_path: Path, model_type: str, field: str, value: object
) -> None:
    folder = with_setting(model_type, tmp_path / "model", field, value)
    if field == "hybrid_override_pattern":
        # As published ones say it.
        config = json.loads((folder / "config.json").read_text())
        del config["layers_block_type"]
        (folder / "config.json").write_text(json.dumps(config))
    with refuses(ConfigurationError) as refused:
        TransformersTarget(config_of(folder))
    # transformers' own sentence of an offset has spaces.
    assert field in f"{refused.value} {refused.value.field}" or value == 5


def with_setting(model_type: str, folder: Path, field: str, value: object) -> Path:
    made = make_hybrid(model_type, folder)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, field: value}))
    return made
