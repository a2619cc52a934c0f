"""Mixtures of experts in Triton: the bits of each expert's layers one after the other, whatever else the pass holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("triton")
from services.verifier.kernels import experts as one_by_one
from services.verifier.kernels.triton import row_experts
from services.verifier.kernels.triton.byte_linear import ByteLinear, ByteType
from services.verifier.kernels.triton.device.expert_rows import add_pairs
from services.verifier.kernels.triton.row_experts import ChosenPairs, RowExperts, is_mixture, use_row_routing
from services.verifier.kernels.triton.row_layers import use_row_kernels
from services.verifier.kernels.triton.row_products import RowLinear, gated
from tests.kernels.triton_interpreter import hopper

# The first products have two leaves.
EXPERTS, TOP, HIDDEN, INNER = 5, 3, 132, 40
SIZES: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": HIDDEN, "intermediate_size": INNER, "moe_intermediate_size": INNER, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts_per_tok": TOP, "pad_token_id": 0,
}  # fmt: skip
DEEPSEEK = {
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 16, "kv_lora_rank": 16,
    "num_key_value_heads": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "n_routed_experts": EXPERTS,
    "n_shared_experts": 1, "head_dim": 8,
}  # fmt: skip
# SiLU gates; biases, matrices the other way round and a clamped gate of neighbours; factors in float32 and shared experts.
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "gpt_oss": {"num_local_experts": EXPERTS, "layer_types": ["full_attention"]},
    "deepseek_v3": DEEPSEEK,
}
MOST = [kind if kind == "qwen3_moe" else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in KINDS]
ALL, FEW = tuple(range(EXPERTS)), (1, 3, 4)


listed = ChosenPairs.of


def mixture_of(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """The part of a decoder layer that has a router and experts; all numbers are random, and large enough to be clamped."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").requires_grad_(False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.get_decoder().layers[0].mlp.to(dtype)


def routed(rows: int, among: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Rows, and for each of them different experts among some, in any order, with their factors."""
    source = torch.Generator().manual_seed(rows)
    given = torch.randn(rows, HIDDEN, generator=source).to(dtype)
    order = torch.rand(rows, len(among), generator=source).argsort(1)[:, :TOP]
    return given, torch.tensor(among)[order], torch.rand(rows, TOP, generator=source).to(dtype)


def expected(own: Any, *given: torch.Tensor, form: ByteType | None = None) -> torch.Tensor:
    """By our layers of each expert, as a CPU computes mixtures (``kernels.experts``)."""

    def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        layer = RowLinear(weight, bias) if form is None else ByteLinear(weight, bias, form=form)
        made: torch.Tensor = layer(rows)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_by_one, "functional", SimpleNamespace(linear=linear))
        if row_experts._gates_by_silu(own):
            patch.setattr(own, "_apply_gate", gated)
        return one_by_one.experts(own, *given)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.exhaustive), torch.bfloat16])
@pytest.mark.parametrize("kind", MOST)
def test_a_row_gets_the_bits_of_its_experts_one_after_the_other(kind: str, dtype: torch.dtype) -> None:
    """Where experts get many rows, few and none; and the same bits alone and beside others, such as padding."""
    plain = mixture_of(kind, dtype).experts
    ours = RowExperts(mixture_of(kind, dtype).experts)
    with hopper():
        for count, among in ((18, FEW), (7, ALL)):
            rows, chosen, factors = routed(count, among, dtype)
            given = (rows, chosen, factors.float() if kind == "deepseek_v3" else factors)
            made = ours(*given)
            assert torch.equal(made, expected(plain, *given))
            for some in (slice(5, 6), slice(2, 7)):
                assert torch.equal(ours(*(one[some] for one in given)), made[some])
        close = plain(*given)
    assert torch.allclose(made.float(), close.float(), atol=0.05 * float(close.abs().max()))
    assert not list(ours.own.parameters(recurse=False))


@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_at_one_expert_and_more_than_a_block(kind: str) -> None:
    plain, ours = mixture_of(kind).experts, RowExperts(mixture_of(kind).experts)
    rows, chosen, factors = (one[:, :1] if one.shape[1] == TOP else one for one in routed(40, ALL, torch.float32))
    chosen = torch.full_like(chosen, 3)
    with hopper():
        pairs = ChosenPairs.of(chosen, EXPERTS)
        made = ours(rows, chosen, factors)
        assert torch.equal(made, expected(plain, rows, chosen, factors))
    assert pairs.size == 16 and pairs.blocks[:3, :3].tolist() == [[3, 0, 16], [3, 16, 16], [3, 32, 8]]
    assert not pairs.blocks[3:, 2].any()


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("kind", MOST)
def test_weights_of_eight_bits(kind: str, form: ByteType) -> None:
    """As ``ByteLinear`` of each expert."""
    plain, ours = (mixture_of(kind, torch.bfloat16).experts for _ in range(2))
    ours = RowExperts(ours, form)
    given = routed(4, ALL, torch.bfloat16)
    with hopper():
        assert torch.equal(ours(*given), expected(plain, *given, form=form))


@pytest.mark.parametrize(("rows", "experts", "top"), [(1, 4, 2), (37, 130, 8), (300, 7, 5), (64, 3, 1)])
def test_pairs_are_listed_by_expert(rows: int, experts: int, top: int) -> None:
    """Each once, ascending; blocks hold them all, none of two experts, and no place is left unwritten. Some choose none."""
    source = torch.Generator().manual_seed(rows)
    chosen = torch.rand(rows, experts, generator=source).argsort(1)[:, :top]
    chosen[-1, -1] = experts + 1
    with hopper():
        found = ChosenPairs.of(chosen, experts)
    order = chosen.flatten().argsort(stable=True)[:-1]
    assert found.pairs[:-1].tolist() == order.tolist()
    held = [pair for _, start, size, _ in found.blocks.tolist() for pair in found.pairs[start : start + size].tolist()]
    assert held == order.tolist()
    for expert, start, size, _ in found.blocks.tolist():
        assert 0 <= size <= found.size and 0 <= expert < experts
        assert {int(chosen.flatten()[pair]) for pair in found.pairs[start : start + size].tolist()} <= {expert}


class Backwards:
    """A fault: the experts of a row are added in the reverse order of their numbers."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda made, chosen, *given, **named: add_pairs[grid](made, EXPERTS - 1 - chosen, *given, **named)


def with_a_wrong_expert(chosen: torch.Tensor, experts: int) -> ChosenPairs:
    """A fault: the first expert's first pair goes to the next expert."""
    made = listed(chosen, experts)
    made.blocks[0, 1:3] += torch.tensor([1, -1])
    made.blocks[3, :3] = torch.tensor([1, 0, 1])
    return made


def test_faults_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = mixture_of("qwen3_moe").experts, RowExperts(mixture_of("qwen3_moe").experts)
    given = routed(12, (0, 1, 2), torch.float32)
    with hopper():
        right = expected(plain, *given)
        assert torch.equal(ours(*given), right)
        with monkeypatch.context() as patch:
            patch.setattr(row_experts, "add_pairs", Backwards())
            made = ours(*given)
            assert torch.allclose(made, right, rtol=1e-4, atol=1e-3) and not torch.equal(made, right)
        with monkeypatch.context() as patch:
            patch.setattr(ChosenPairs, "of", with_a_wrong_expert)
            made = ours(*given)
            wrong = (made != right).any(1)
            # The row of the pair that went astray, and no other.
            assert wrong.tolist() == [row == 0 for row in range(12)]
        ours.up.held.leaf = 64
        made = ours(*given)
        assert torch.allclose(made, right, rtol=1e-4, atol=1e-3) and not torch.equal(made, right)


@pytest.mark.parametrize("kind", MOST)
def test_what_chooses_experts_is_computed_by_rows_too(kind: str) -> None:
    """The whole part of the layer: nothing that multiplies is left to torch, and a row does not depend on others."""
    model = nn.ModuleDict({"mlp": mixture_of(kind)})
    plain = mixture_of(kind)
    assert use_row_kernels(model) == []
    rows = torch.randn(1, 19, HIDDEN, generator=torch.Generator().manual_seed(0))

    def made(given: torch.Tensor) -> torch.Tensor:
        found = model["mlp"](given)
        return found if isinstance(found, torch.Tensor) else found[0]

    with hopper():
        together = made(rows)
        assert torch.equal(made(rows[:, 3:4]), together[:, 3:4]) and torch.equal(made(rows[:, :17]), together[:, :17])
        theirs = plain(rows)
    theirs = theirs if isinstance(theirs, torch.Tensor) else theirs[0]
    assert torch.allclose(together, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


class Ungated(nn.Module):
    """Experts of another form: without gates, with a norm behind each."""

    has_gate = has_bias = is_transposed = False
    has_post_expert_norm = True
    _apply_gate = None

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.act_fn = EXPERTS, nn.functional.relu
        self.up_proj = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN), requires_grad=False)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER), requires_grad=False)
        self.post_expert_norm = nn.RMSNorm(HIDDEN)


def test_experts_without_gates_and_with_norms_behind_them() -> None:
    torch.manual_seed(0)
    plain = Ungated()
    torch.manual_seed(0)
    ours = RowExperts(Ungated())
    given = routed(7, ALL, torch.float32)
    with hopper():
        assert torch.equal(ours(*given), expected(plain, *given))


def test_gates_and_routers_of_other_forms_are_told_apart() -> None:
    own = mixture_of("qwen3_moe").experts
    assert is_mixture(own) and row_experts._gates_by_silu(own)
    del own.act_fn
    others: list[Any] = [nn.functional.gelu, lambda rows: nn.functional.silu(rows).clamp(max=20.0), nn.functional.relu]
    for other in others:
        own.act_fn = other
        assert not row_experts._gates_by_silu(own)
    assert not is_mixture(nn.Linear(3, 3)) and not use_row_routing(nn.Linear(3, 3))

    class Odd(nn.Module):
        """Multiplies in another way."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8), requires_grad=False)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows @ self.weight.T

    assert not use_row_routing(Odd())
