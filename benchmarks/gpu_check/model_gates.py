"""G5 and G6: a whole model's logits in every packing, and what a pass costs by rows, context and requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from benchmarks.gpu_check.bare_model import BareModel
from benchmarks.gpu_check.gpu import milliseconds
from benchmarks.gpu_check.packings import bushy_tree, rows_of, starts_of, tree
from benchmarks.gpu_check.verdicts import GateVerdict, judge_rows

# Rows, tokens before them, and requests that share the rows.
Pass = tuple[int, int, int]
PASSES: tuple[Pass, ...] = (
    *((rows, 256, 1) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)),
    *((rows, 4096, 1) for rows in (1, 16, 64)),
    *((rows, 256, 8) for rows in (8, 64, 128)),
    *((rows, 256, 64) for rows in (64, 128, 256)),
)
# What the design must show.
_LEAST_SHARE, _MOST_STAIR = 0.7, 1.25


def same_bits(models: Mapping[str, BareModel], **sizes: int) -> GateVerdict:
    """G5, of models by their names; ``sizes``: of ``differing_rows``."""
    wrong: list[str] = []
    compared = 0
    for name, model in models.items():
        found, count = differing_rows(model, **sizes)
        wrong += [f"{name}: {row}" for row in found]
        compared += count
    return judge_bits(wrong, compared, sorted({kind for model in models.values() for kind in model.left}))


def differing_rows(
    model: BareModel, length: int = 600, depth: int = 8, others: int = 5, vocabulary: int = 128256
) -> tuple[list[str], int]:
    """The logits of plain decoding, of prompts in chunks, and of trees beside other requests, each pass twice: the rows that
    differ, and how many were compared.
    """
    text = torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    whole = model.logits([rows_of("0", 0, text)])
    half = length // 2 + 1
    halves = torch.cat([model.logits([rows_of("1", 0, text[:half])]), model.logits([rows_of("1", half, text[half:])])])
    wrong = [f"chunk, position {position}" for position in _rows_that_differ(halves, whole)]
    compared = length
    for start in starts_of(length, depth):
        path = range(start, start + depth + 1)
        plain = torch.cat([model.logits([rows_of("0", at, text[at : at + 1])]) for at in path])
        wrong += [f"prompt, position {start + row}" for row in _rows_that_differ(whole[start : start + depth + 1], plain)]
        compared += len(path)
        for name, packed in {
            "tree": tree(start, depth, others, length, seed=start), "bushy tree": bushy_tree(start, depth, length)
        }.items():  # fmt: skip
            tokens = [text[place] for place in packed.shown]
            made = model.logits([rows_of("1", 0, text[:5]), rows_of("0", start, tokens, packed.parents)])[5:]
            wrong += [f"{name}, position {start + row}" for row in _rows_that_differ(made[list(packed.path)], plain)]
            compared += len(path)
            # The tree has overwritten what follows the position.
            model.logits([rows_of("0", start, text[start:])])
    wrong += [f"{model.unsteady} passes that ran again"] if model.unsteady else []
    return wrong, compared


def _rows_that_differ(made: torch.Tensor, expected: torch.Tensor) -> list[int]:
    return [row for row, (one, other) in enumerate(zip(made, expected, strict=True)) if not torch.equal(one, other)]


def judge_bits(wrong: Sequence[str], compared: int, left: Sequence[str]) -> GateVerdict:
    """The verdict on rows of logits that differ; ``left``: kinds of layers that are not ours."""
    look = "if G2 and G4 passed, look at what is left: rotary embedding, residuals"
    return judge_rows(
        wrong,
        compared,
        differ="of logits differ",
        same="of logits are equal in chunks, trees and alone",
        look=look + (f", and torch's {', '.join(left)}" if left else ""),
        follows="the model is exact in bfloat16",
    )


def step_costs(model: BareModel, terabytes: float, passes: Sequence[Pass] = PASSES) -> GateVerdict:
    """G6: captured passes, timed; ``terabytes``: measured bandwidth, TB/s."""
    times: dict[Pass, float] = {}
    for rows, context, requests in passes:
        each = rows // requests
        batch = [rows_of(str(number), context, [1] * each, range(-1, each - 2)) for number in range(requests)]
        times[rows, context, requests] = milliseconds(model.captured(batch).replay)
    per_token = sum(2 * call.kv_heads * (call.key_size + call.value_size) for call in model.pool.calls)
    floors = {one: 1e-9 * (model.bytes + one[1] * one[2] * per_token) / terabytes for one in times}
    return judge_costs(times, floors)


def judge_costs(times: Mapping[Pass, float], floors: Mapping[Pass, float]) -> GateVerdict:
    """The verdict on milliseconds by pass, and those that reading memory takes."""
    table = [["rows", "context", "requests", "ms", "floor ms", "share"]]
    for (rows, context, requests), found in times.items():
        floor = floors[rows, context, requests]
        table.append([f"{rows}", f"{context}", f"{requests}", f"{found:.2f}", f"{floor:.2f}", f"{floor / found:.0%}"])
    one, many = times[1, 256, 1], times[64, 256, 1]
    share, stair = floors[1, 256, 1] / one, many / one
    slow = [f"plain decoding must reach {_LEAST_SHARE:.0%}: profile one pass (nsys)"] if share < _LEAST_SHARE else []
    slow += [f"64 rows must cost at most {_MOST_STAIR} of one: look at G2's Triton rows"] if stair > _MOST_STAIR else []
    return GateVerdict(
        result="fail" if slow else "pass",
        found=f"plain decoding runs at {share:.0%} of the bandwidth, 64 rows cost {stair:.2f} times one",
        follows="; ".join(slow) or "write the table into docs/log.md, and run the benchmark",
        figures={"milliseconds": {str(one): found for one, found in times.items()}},
        table=table,
    )
