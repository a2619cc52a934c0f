"""Norms with a gate by our kernel, in Triton's interpreter: known by what they compute, and no row depends on others."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated

pytest.importorskip("triton")
from services.verifier.kernels.triton.row_gated_norm import gated_norm_of

NORMS: dict[str, nn.Module] = {
    "of heads": Qwen3NextRMSNormGated(24),
    "of a row": MambaRMSNormGated(40, 40),
    "of groups": MambaRMSNormGated(48, 12),
    "not rounded": FalconH1RMSNormGated(32, n_groups=2, norm_before_gate=False),
    "by a sigmoid": KimiLinearRMSNormGated(24),
}


@pytest.mark.parametrize("name", NORMS)
@torch.no_grad()
def test_they_are_known_and_compute_the_same(name: str) -> None:
    norm = NORMS[name]
    weight = norm.get_parameter("weight")
    torch.manual_seed(0)
    nn.init.normal_(weight)
    ours = gated_norm_of(norm)
    assert ours is not None
    rows, gate = torch.randn(2, 1, 7, len(weight))
    made = ours(rows, gate)
    torch.testing.assert_close(made, norm(rows, gate=gate), atol=1e-5, rtol=1e-5)
    assert torch.equal(ours(rows[:, 3:4], gate[:, 3:4]), made[:, 3:4])


@torch.no_grad()
def test_others_are_not_taken_for_one() -> None:
    assert gated_norm_of(Qwen3NextRMSNorm(24)) is None

    class Other(MambaRMSNormGated):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return hidden_states * gate

    assert gated_norm_of(Other(24, 24)) is None
