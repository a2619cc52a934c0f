"""G1 and G3: what the chip can do at most, and how its matrix units add."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.gpu_check.gpu import milliseconds
from benchmarks.gpu_check.verdicts import GateVerdict
from services.verifier.kernels.triton.device.row_matmul import one_product

# Below these, other work or a limit of power is likely on a GPU of a data centre since Ampere (A100: 2.0 TB/s, 312 TFLOP/s).
_LEAST_TERABYTES, _LEAST_TERAFLOPS = 1.0, 150.0


def ceilings(device: str, copied: int = 2**30, side: int = 8192) -> GateVerdict:
    """G1: the speeds of a copy of so many numbers in memory, and of a product of squares of ``side``, in bfloat16."""
    source = torch.empty(copied, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    copy_ms = milliseconds(lambda: target.copy_(source))
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    return judge_ceilings(2 * 2 * len(source) / copy_ms / 1e9, 2 * side**3 / milliseconds(lambda: left @ right) / 1e9)


def judge_ceilings(terabytes: float, teraflops: float) -> GateVerdict:
    """The verdict on measured speeds, in TB/s and TFLOP/s."""
    good = terabytes >= _LEAST_TERABYTES and teraflops >= _LEAST_TERAFLOPS
    rows = 1e12 * teraflops / (1e12 * terabytes)
    return GateVerdict(
        result="pass" if good else "fail",
        found=f"{terabytes:.2f} TB/s, {teraflops:.0f} TFLOP/s: {rows:.0f} rows cost as much as reading the weights",
        follows="the floors below are computed from these" if good else
        f"expected at least {_LEAST_TERABYTES} TB/s and {_LEAST_TERAFLOPS:.0f} TFLOP/s: does nvidia-smi show other work?",
        figures={"terabytes_per_second": terabytes, "teraflops": teraflops},
    )  # fmt: skip


def multiplied(left: torch.Tensor, right: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    """``before + left @ right`` by one product of tiles, float32."""
    made = torch.zeros(len(left), right.shape[1], device=left.device) if before is None else before.clone()
    one_product[(1,)](
        left.contiguous(), right.contiguous(), made, ROWS=len(left), TERMS=left.shape[1], COLUMNS=right.shape[1]
    )
    return made


def how_it_adds(device: str, least_rows: int = 16) -> GateVerdict:
    """G3: whether sixteen terms are added in any order with the same result, zeros and groups of zeros change nothing, and
    small and large products (mma and wgmma) agree, as far as there are any of fewer than 64 rows.
    """
    generator, rows = torch.Generator().manual_seed(0), 64
    left, right = (torch.randn(*shape, generator=generator).bfloat16().to(device) for shape in ((rows, 64), (64, 64)))
    # Sums in which order matters: terms of very different sizes.
    left *= torch.exp2(torch.randint(-6, 6, (rows, 64), generator=generator)).to(left)
    plain = multiplied(left, right)
    inside = torch.cat([torch.randperm(16, generator=generator) + 16 * group for group in range(4)]).to(device)
    across = torch.arange(64, device=device).view(4, 16).T.flatten()
    zeros = torch.zeros_like(left[:, :16])
    spread = torch.cat([left[:, :16], zeros, left[:, 16:32], zeros], 1)
    spread_right = torch.cat([right[:16], right[48:], right[16:32], right[:16]])
    half = torch.cat([left[:, :32], zeros, zeros], 1)
    # Eight terms and eight zeros in one group, in two orders.
    some = left.clone().view(rows, 4, 16)
    some[:, :, 8:] = 0
    some = some.view(rows, 64)
    moved = torch.cat([some.view(rows, 4, 2, 8)[:, :, [1, 0]].reshape(rows, 64)])
    moved_right = right.view(4, 2, 8, 64)[:, [1, 0]].reshape(64, 64)
    checks: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
        "any order within sixteen": lambda: (plain, multiplied(left[:, inside], right[inside])),
        "zeros anywhere within sixteen": lambda: (multiplied(some, right), multiplied(moved, moved_right)),
        "groups of zeros": lambda: (multiplied(half, right), multiplied(spread, spread_right)),
        "the sum so far is an operand": lambda: (
            plain, multiplied(left[:, 32:], right[32:], multiplied(left[:, :32], right[:32])),
        ),
        f"{least_rows} rows as 64": lambda: (plain[:least_rows], multiplied(left[:least_rows], right)),
    }  # fmt: skip
    seen = {name: torch.equal(*check()) for name, check in checks.items()}
    # The check itself: an order that must show.
    sharp = not torch.equal(plain, multiplied(left[:, across], right[across]))
    return judge_adding(seen, sharp)


def judge_adding(seen: dict[str, bool], sharp: bool) -> GateVerdict:
    """The verdict on which reorderings gave equal bits; ``sharp``: whether one across groups gave others."""
    wrong = [name for name, same in seen.items() if not same]
    if not sharp:
        found, follows = (
            "terms of other groups may change places, too",
            "the check's numbers are too tame: enlarge their spread",
        )
    elif wrong:
        found = f"not so: {', '.join(wrong)}"
        follows = (
            "if small and large products alone disagree, try --least-rows 64; else trees in bfloat16 are not exact on this "
            "chip: serve with near ties, or put every node at its position's lane"
        )
    else:
        found, follows = "groups of sixteen, as on paper", "trees can have the bits of plain decoding"
    figures = {**seen, "an order across groups shows": sharp}
    return GateVerdict(result="pass" if sharp and not wrong else "fail", found=found, follows=follows, figures=figures)
