"""Linear layers by cuBLASLt whose rows do not depend on the others: without split sums, and never of few rows."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from services.verifier.kernels.shared_products import as_parameter

# Fewer rows may take a kernel of another kind.
_LEAST_ROWS = 16


def forbid_split_sums() -> None:
    """Keep cuBLASLt from splitting a product's sums, in this process. Must come before its first product on a GPU.

    Without workspace it has no room for parts of sums, so each runs from its first term to its last (vLLM's batch-invariant
    mode on Hopper did the same, vllm-project/vllm#28161). Newer releases of torch forbid it by name as well. Where torch has
    no CUDA only the settings change.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")
    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul = torch.backends.cuda.matmul
    for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
        # Parts of sums in reduced precision; and parts at all, where torch takes a second value (pytorch/pytorch#164766).
        setattr(matmul, name, (False, False) if hasattr(matmul, f"{name}_split_k") else False)


class PaddedLinear(nn.Module):
    """Replaces ``nn.Linear`` on a GPU: cuBLASLt's product of at least 16 rows.

    Fewer may take a kernel of another kind. A row's result does not depend on the others as long as cuBLASLt does not
    split sums (``forbid_split_sums``).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = as_parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @override
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        flat = rows.reshape(-1, self.in_features)
        missing = max(0, _LEAST_ROWS - len(flat))
        made = functional.linear(functional.pad(flat, (0, 0, 0, missing)) if missing else flat, self.weight, self.bias)
        return made[: len(flat)].view(*rows.shape[:-1], self.out_features)
