"""What is planned of mixtures, ranks and layers with a state is what is made: counted here on tiny models."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from services.verifier.attention.calls import Call, Running, answering
from services.verifier.attention.fixed import Largest, largest_pass
from services.verifier.attention.recording import Recorded, record
from services.verifier.config import TargetConfig
from services.verifier.kernels import experts
from services.verifier.loading.cut_layers import TYPES, cut_layers, gather_between
from services.verifier.loading.load_model import hollow_model
from services.verifier.loading.memory import kept_states, noted_bytes, state_slots, stepped_bytes
from services.verifier.loading.model_size import shape_of
from services.verifier.loading.part_sizes import Mixture
from services.verifier.model.target_port import Rows
from services.verifier.recurrence import functions
from services.verifier.recurrence.captured_steps import SteppedBuckets, unwrapped
from services.verifier.recurrence.order import Line, Order
from services.verifier.recurrence.room import captured_places, launched_places, places_of
from services.verifier.recurrence.state_pool import StatePool
from services.verifier.recurrence.walks import StateWalk
from services.verifier.stages.stage_ranks import StageRanks
from tests.lossless.tiny_configs import tiny_config

# Shares of it are whole vectors; two heads of keys, which four ranks hold twice.
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 192, "moe_intermediate_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320,
}  # fmt: skip
LATENT: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 8, "head_dim": 8, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip
ROWS = 8


def config_of(folder: Path, model_type: str, **others: Any) -> tuple[TargetConfig, PreTrainedConfig]:
    made = tiny_config(model_type, SIZES["vocab_size"])
    for name, value in {**others, "architectures": None}.items():
        setattr(made, name, value)
    made.save_pretrained(folder)
    return TargetConfig(
        model_path=str(folder), kv_cache_tokens=1024, max_model_len=256, dtype="bfloat16", device="cuda"
    ), made


class Counted:
    """Implements ``Gathers`` of ranks that all make the same, and counts a row's numbers."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.times, self.numbers = ranks, 0, 0

    def gather(self, own: torch.Tensor, within_s: float | None = None) -> torch.Tensor:
        self.times, self.numbers = self.times + 1, self.numbers + own.numel() * self.ranks // ROWS
        return own.expand(self.ranks, *own.shape)


@torch.inference_mode()
def ran(model: PreTrainedModel) -> Recorded:
    """A pass over rows of a model without weights, which gets some."""
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.zero_()
    return record(model, torch.arange(1, ROWS + 1)[None], None)


@pytest.mark.examples(3)
@pytest.mark.parametrize("kind", TYPES)
def test_a_rank_holds_and_exchanges_what_is_planned(kind: str, tmp_path: Path) -> None:
    """Routers and norms are whole in each, and keys of which there are too few."""
    config, _ = config_of(tmp_path, kind, **(LATENT if kind == "deepseek_v3" else SIZES))
    shape = shape_of(config)
    for ranks in (2, 4):
        model, shards, counted = hollow_model(config), StageRanks(0, ranks), Counted(ranks)
        cut_layers(model, shards)
        gather_between(model, shards)
        shards.connect(counted)
        held = sum(parameter.numel() for parameter in model.parameters())
        # A plan counts whole numbers of parameters in each layer.
        assert held - 2 * shape.layers <= shape.weights(replace(config, tensor_parallel_size=ranks)) / 2 <= held
        experts.use(model)
        ran(model)
        planned = shape.gathers
        assert (counted.times, counted.numbers) == (planned.times, planned.numbers + ranks * planned.repeated)


def test_what_is_read_of_a_mixture(tmp_path: Path) -> None:
    """The experts that rows choose; the router, and an expert that gets every row, always."""
    config, _ = config_of(tmp_path, "deepseek_v3", **LATENT)
    shape, model = shape_of(config), hollow_model(config)
    (mixture,) = shape.mixtures
    # Of four layers the first is dense; an expert has three matrices.
    expert = 3 * 3 * 128 * 64
    assert mixture == Mixture(parameters=4 * expert, experts=4, chosen=2)
    always = sum(
        parameter.numel() for name, parameter in model.named_parameters() if ".experts." not in name and "embed" not in name
    )
    for rows, experts_read in ((1, 2), (2, 3), (3, 3.5)):
        assert shape.read_per_pass(config, rows) / 2 == pytest.approx(always + experts_read * expert, abs=8)
    assert shape.multiplied(config) == pytest.approx(always + 2 * expert, abs=8)
    # Of two ranks each reads half of the experts, and what is whole in both.
    whole = 4 * shape.uncut.per_layer + shape.uncut.others
    router = model.get_submodule("model.layers.1.mlp.gate").get_parameter("weight").numel()
    assert 3 * router < whole and shape.uncut.keys == 0
    halved = shape.read_per_pass(replace(config, tensor_parallel_size=2)) / 2
    assert halved == pytest.approx((always - whole) / 2 + whole + expert, abs=12)


def test_experts_that_are_not_asked_through_the_interface_count_as_read(tmp_path: Path) -> None:
    config, _ = config_of(tmp_path, "llama4_text")
    shape = shape_of(config)
    assert shape.mixtures == () and shape.read_per_pass(config, 1) == shape.read_per_pass(config, 64)


class Unlaunched:
    """In a kernel's place."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


class OfRows:
    """Implements ``Buckets`` and ``FixedPass``: passes of so many rows, whose attention gives zeros."""

    def __init__(self, rows: int) -> None:
        self.tokens = torch.zeros(rows, dtype=torch.int64)
        self.positions = self.tokens

    def allowed(self, largest: Largest) -> list[int]:
        return [len(self.tokens)]

    def bucket(self, batch: object) -> int:
        return len(self.tokens)

    def make(self, bucket: object) -> OfRows:
        return self

    def fill(self, batch: object) -> None:
        pass

    def attend(self, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])


LATER = [pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("jamba", "rwkv", "recurrent_gemma")]


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2", *LATER])
def test_layers_with_a_state_take_what_is_planned(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very tensors of a captured pass: kernels are not launched, but all that they get is made."""
    row_steps = pytest.importorskip("services.verifier.kernels.triton.row_steps")
    for name in ("step_keyed", "divide_by_lengths", "convolve", "hold_inputs", "step_gated", "step_mean"):
        monkeypatch.setattr(row_steps, name, Unlaunched())
    put_aside, places = [0], row_steps.TritonSteps._places

    def noted(self: object, walk: StateWalk, states: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = places(self, walk, states)
        put_aside.append(made.nbytes)
        return made

    monkeypatch.setattr(row_steps.TritonSteps, "_places", noted)
    config, made = config_of(tmp_path, kind)
    config = replace(config, pass_rows=ROWS, pass_requests=2, mamba_block_size=128)
    shape, model = shape_of(config), AutoModelForCausalLM.from_config(made)
    functions.install(model)
    recorded = ran(model)
    pool = StatePool(
        recorded.state_shapes, slots=state_slots(config), kept=kept_states(config), device=torch.device("cpu"),
        library=None, steps=row_steps.TritonSteps(),
    )  # fmt: skip
    # The states of requests and of prefixes.
    assert shape.states(config) == sum(states.nbytes for states in pool.states)
    buckets = SteppedBuckets(OfRows(ROWS), pool, config.pass_requests)
    (bucket,) = buckets.allowed(largest_pass(config))
    one = buckets.make(bucket)
    pool.assign("a")
    one.fill([Rows(request_id="a", context=0, tokens=(1, 2, 3, 4), parents=(-1, 0, 0), logits=1)])
    inner, steps = unwrapped(one)
    with torch.inference_mode(), answering(Running(inner, recorded.calls, steps)):
        model(torch.ones(1, ROWS, dtype=torch.int64), use_cache=False)
    notes = sum(given.nbytes for given in pool._noted.given)
    assert notes == noted_bytes(config, shape) > 0
    assert max(put_aside) == captured_places(ROWS) * shape.stepped.put_aside * 4
    # The request's rows are copied when it sits out: a row's share of what is noted, for each node.
    pool.assign("b")
    pool.begin_captured([Rows(request_id="b", context=0, tokens=(1,), logits=1)])
    nodes = pool._held["a"].nodes
    assert nodes is not None and sum(given.nbytes for given in nodes.given) == 3 * notes / ROWS
    launched = launched_places(ROWS, 2) * shape.stepped.put_aside * 4
    assert stepped_bytes(config, shape) == 2 * notes + max(put_aside) + launched
    assert stepped_bytes(replace(config, device="cpu"), shape) == 0
    # Eight requests of one node each cannot all be in a pass; one alone has no more nodes than a tree.
    assert stepped_bytes(replace(config, pass_rows=512, pass_requests=1), shape) == pytest.approx(
        notes / ROWS * (512 + 128) + (64 + 7) * shape.stepped.put_aside * 4
    )


def test_no_tree_puts_more_states_aside_than_is_planned() -> None:
    source = random.Random(0)
    for _ in range(200):
        trees = [[source.randint(-1, node - 1) for node in range(source.randint(0, 40))] for _ in range(3)]
        lines = [Line(slot=at, accepted=0, chain=1, parents=parents) for at, parents in enumerate(trees)]
        order = Order(lines=lines, padding=0, device=torch.device("cpu"))
        rows = sum(1 + len(parents) for parents in trees)
        assert order.walk.places <= sum(places_of(len(parents)) for parents in trees) <= launched_places(rows, 3)
