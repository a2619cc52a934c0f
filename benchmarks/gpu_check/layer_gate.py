"""G2: whether a row of a linear layer has the same bits beside any others, by two routes, and how fast each reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu_check.gpu import milliseconds
from benchmarks.gpu_check.verdicts import GateVerdict
from benchmarks.inflate import Size
from services.machine.captured import captured
from services.verifier.kernels.padded_linear import PaddedLinear, forbid_split_sums
from services.verifier.kernels.triton.row_products import RowLinear

Route = Callable[[torch.Tensor], torch.Tensor]
MakeRoutes = Callable[[torch.Tensor], dict[str, Route]]
# Rows whose bits are compared with those of sixteen, and rows that are timed.
COMPARED = (1, 17, 32, 48, 64, 128, 200, 256, 512)
TIMED = (16, 32, 64, 128)
_LEAST_ROWS, _SHIFT = 16, 5
# An H100 keeps 50 MB.
_BEYOND_CACHE = 2**27
CUBLAS, TRITON = "cuBLASLt without split-K", "Triton"


def shapes_of(size: Size, vocabulary: int) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the five products of a pass."""
    queries, keys = size.heads * size.head_size, size.kv_heads * size.head_size
    return {
        "query, key, value": (queries + 2 * keys, size.width),
        "attention's output": (size.width, queries),
        "gate and up": (2 * size.intermediate, size.width),
        "down": (size.width, size.intermediate),
        "output layer": (vocabulary, size.width),
    }


def routes_of(weight: torch.Tensor, least_rows: int = _LEAST_ROWS) -> dict[str, Route]:
    """Both ways to multiply by ``weight``."""
    return {CUBLAS: PaddedLinear(weight), TRITON: RowLinear(weight, least_rows=least_rows)}


def differing(route: Route, rows: torch.Tensor, compared: Sequence[int]) -> list[int]:
    """The numbers of rows beside which some row has other bits than among sixteen, or in a second run.

    Rows lie at two places of a pass, so that every row of a tile is compared.
    """
    few = [route(rows[start : start + _LEAST_ROWS]) for start in range(0, len(rows), _LEAST_ROWS)]
    expected = torch.cat(few)

    def same(start: int, count: int) -> bool:
        given = rows[start : start + count]
        return all(torch.equal(route(given), expected[start : start + count]) for _ in range(2))

    return [count for count in compared if not all(same(start, count) for start in (0, min(_SHIFT, len(rows) - count)))]


def linear_layers(
    shapes: dict[str, tuple[int, int]],
    device: str,
    compared: Sequence[int] = COMPARED,
    timed: Sequence[int] = TIMED,
    *,
    routes_of: MakeRoutes = routes_of,
    prepare: Callable[[], None] = forbid_split_sums,
) -> GateVerdict:
    """G2. Without ``timed`` nothing is timed. After ``prepare`` the process has cuBLASLt as a verifier has it."""
    prepare()
    wrong: dict[str, list[str]] = {CUBLAS: [], TRITON: []}
    speeds: dict[str, dict[str, dict[int, float]]] = {}
    table = [["layer", "by", "bits differ beside", *(f"GB/s at {count} rows" for count in timed)]]
    generator = torch.Generator(device).manual_seed(0)
    for layer, (columns, terms) in shapes.items():
        weight = torch.randn(columns, terms, generator=generator, device=device).bfloat16()
        rows = torch.randn(max(compared), terms, generator=generator, device=device).bfloat16()
        for name, route in routes_of(weight).items():
            found = differing(route, rows, compared)
            wrong[name] += [f"{layer} ({', '.join(map(str, found))} rows)"] if found else []
            own = {count: _gigabytes(name, rows[:count], weight, routes_of) for count in timed}
            speeds.setdefault(name, {})[layer] = own
            table.append([layer, name, ", ".join(map(str, found)) or "none", *(f"{own[count]:.0f}" for count in timed)])
    return judge_layers(wrong, speeds, table)


def _gigabytes(name: str, rows: torch.Tensor, weight: torch.Tensor, routes_of: MakeRoutes) -> float:
    """GB/s at which a layer's weights are read. Copies take turns, so that the GPU's cache does not hold them."""
    copies = [routes_of(weight.clone())[name] for _ in range(1 + _BEYOND_CACHE // (2 * weight.numel()))]

    def run() -> object:
        return [route(rows) for route in copies]

    # As passes are replayed: launched one by one, small layers would be timed by the host's work.
    replay = captured(run)[0].replay if rows.is_cuda else run
    return 2e-6 * weight.numel() * len(copies) / milliseconds(replay)


def judge_layers(
    wrong: dict[str, list[str]], speeds: dict[str, dict[str, dict[int, float]]], table: list[list[str]]
) -> GateVerdict:
    """The verdict: a route passes whose bits never differ; of two, the one that reads faster on the whole is named."""
    exact = [name for name, layers in wrong.items() if not layers]
    # Seconds for one row block of every layer decide: the slow layers count for most.
    time_of = {name: sum(1 / speed for own in speeds[name].values() for speed in own.values()) for name in exact}
    if not exact:
        found = "; ".join(f"{name}: {', '.join(layers)}" for name, layers in wrong.items())
        follows = "no route is exact: look at the Triton products first (tiles, split of sums)"
    else:
        found = f"equal bits by {' and by '.join(exact)}"
        found += "".join(f"; not by {name}: {', '.join(layers)}" for name, layers in wrong.items() if layers)
        follows = f"use {min(exact, key=lambda name: time_of[name])}" + (", the faster one" if len(exact) > 1 else "")
    figures = {"differ": wrong, "gigabytes_per_second": speeds}
    return GateVerdict(result="pass" if exact else "fail", found=found, follows=follows, figures=figures, table=table)
