"""Times the target's passes at start, and stores the result for the next start on the same machine."""

from __future__ import annotations

import logging
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from services.machine.processor import processor
from services.verifier.attention.calls import MAX_NODES
from services.verifier.checks.kept_measurements import Kept, digest_of
from services.verifier.config import TargetConfig
from services.verifier.kv_cache.pool import BLOCK
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from speculation.costs import CostTable, Load

log = logging.getLogger(__name__)

_FORMAT = 3
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
# Captured passes are padded: one row more than a bucket costs as much as the whole next bucket. Our own kernels have so many
# buckets, eight rows apart or more, that their ends are close to a line: some of them tell it.
_STAIRS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384, 512, 513)
_REQUESTS = 8
_CONTEXT = 256
_LONGER = 4096
_REPEATS = 3
# A stored table is checked by passes over one row and over a few, unless these take too long. The ratio of their times may
# differ from the table's by this factor.
_FEW = 8
_SLOW_S = 0.5
_SURPRISE = 1.5

Name = TypeVar("Name", bound=str | int)


def costs_of(target: TransformersTarget, config: TargetConfig, folder: Path | None) -> CostTable:
    """The target's cost table, read from ``folder`` where an earlier start stored it, or measured (a few seconds).

    A file that is damaged, no longer holds, or is of another model, machine or setting is replaced by a new measurement.
    """
    plan = _plan(target)
    planned = {"format": _FORMAT, "rows": list(plan.rows), "context": plan.context, "longer": plan.longer}
    kept = Kept(folder, machine_and_model(target, config) | planned)
    found = kept.read(CostTable.from_object)
    if found is not None and _still_holds(target, plan, found):
        return found
    start = time.perf_counter()
    table = measure(target, plan)
    log.info("measured the costs of passes in %.1f s: %s", time.perf_counter() - start, table.as_object())
    kept.write(table.as_object())
    return table


def _still_holds(target: TransformersTarget, plan: _Plan, table: CostTable) -> bool:
    """Whether a few rows still cost as much relative to one row as the table says.

    They do not if other work disturbed the stored measurement.
    """
    few = max(rows for rows in plan.rows if rows <= _FEW)
    one, some = (Load(rows=rows, requests=1, keys=plan.context, row_keys=rows * plan.context) for rows in (1, few))
    if not target.open("check", plan.context + MAX_NODES + 1):
        return True
    try:
        passes = {rows: [_chain("check", plan.context, rows)] for rows in (1, few)}
        # A slow model is measured for so long that brief disturbances do not matter. A pass says whether it is slow, since
        # the table may have been disturbed.
        if _seconds(target, {1: passes[1]}, repeats=1)[1] > _SLOW_S:
            return True
        measured = _seconds(target, passes)
    finally:
        target.close("check")
    difference = measured[few] / measured[1] / (table.seconds(some) / table.seconds(one))
    if 1 / _SURPRISE <= difference <= _SURPRISE:
        return True
    log.warning(
        "the costs of passes are measured anew: the cost of %d rows relative to one is %.1f times the stored one",
        few,
        difference,
    )
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What to measure: passes over each number of ``rows`` after ``context`` tokens, and some after ``longer`` tokens."""

    rows: tuple[int, ...]
    context: int
    longer: int


def _plan(target: TransformersTarget) -> _Plan:
    """The largest plan that the pool and the model's positions allow."""
    most = min(target.max_model_len, target.blocks.total * BLOCK) - MAX_NODES - 1
    context = max(1, min(_CONTEXT, most // 2))
    # Some models have no positions beyond their longest context.
    wanted = _STAIRS if target.captured else _ROWS
    longer = max(context, min(_LONGER, most))
    room = min(target.max_model_len, longer + MAX_NODES + 1)
    return _Plan(rows=tuple(rows for rows in wanted if rows == 1 or context + rows <= room), context=context, longer=longer)


def measure(target: TransformersTarget, plan: _Plan) -> CostTable:
    """Time passes over one request, over several requests, and after a longer context.

    The contexts are not computed: the values of the keys do not change a pass's cost.
    """
    names = [f"calibration {number}" for number in range(_REQUESTS)]
    rooms = [plan.longer, *[plan.context] * (_REQUESTS - 1)]
    # Requests for which a small pool has no room are left out.
    opened = [name for name, room in zip(names, rooms, strict=True) if target.open(name, room + MAX_NODES + 1)]
    most = max(rows for rows in plan.rows if rows <= MAX_NODES)
    try:
        passes: dict[str | int, list[Rows]] = {rows: [_chain(opened[0], plan.context, rows)] for rows in plan.rows}
        passes["together"] = [_chain(name, plan.context, 1) for name in opened]
        times = _seconds(target, passes)
        behind = _seconds(target, {rows: [_chain(opened[0], plan.longer, rows)] for rows in (1, most)})
    finally:
        for name in opened:
            target.close(name)
    by_rows = {rows: times[rows] for rows in plan.rows}
    # If the contexts differ too little, the difference is only noise.
    way = plan.longer - plan.context
    # What one key adds to a pass: the cost of reading it once, and a cost for every row that attends to it.
    added = {rows: max(0.0, behind[rows] - by_rows[rows]) / way if way >= _CONTEXT else 0.0 for rows in behind}
    per_row_key = max(0.0, added[most] - added[1]) / (most - 1) if most > 1 else 0.0
    per_key = max(0.0, added[1] - per_row_key)
    same_rows = CostTable(by_rows=by_rows, per_request=0.0, per_key=0.0).of_rows(len(opened))
    others = len(opened) - 1
    keys = plan.context * (per_key + per_row_key)
    per_request = (times["together"] - same_rows) / others - keys if others else 0.0
    # The measured times include the cost of the context's keys; subtract it.
    bare = {
        rows: max(seconds - plan.context * (per_key + rows * per_row_key), 0.1 * seconds)
        for rows, seconds in by_rows.items()
    }
    return CostTable(by_rows=bare, per_request=per_request, per_key=per_key, per_row_key=per_row_key)


def _chain(name: str, context: int, rows: int) -> Rows:
    """A chain of nodes; more than a tree may have are a prompt's."""
    nodes = rows - 1 if rows <= MAX_NODES + 1 else 0
    return Rows(request_id=name, context=context, tokens=(0,) * rows, parents=tuple(range(-1, nodes - 1)), logits=1 + nodes)


def _pretend(target: TransformersTarget, batch: Sequence[Rows]) -> None:
    """Mark the tokens before each request's rows as computed in every stage, without computing them."""
    for rows in batch:
        target.keep(rows.request_id, rows.context, ())


def _seconds(
    target: TransformersTarget, passes: Mapping[Name, Sequence[Rows]], *, repeats: int = _REPEATS
) -> dict[Name, float]:
    """The shortest of a few times of each pass, in seconds. Passes alternate, so that other load affects all alike."""
    best = dict.fromkeys(passes, math.inf)
    for _ in range(1 + repeats):
        for name, batch in passes.items():
            _pretend(target, batch)
            start = time.perf_counter()
            target.begin(batch)
            # On a GPU logits stay where they are, as in decoding; copying them would take longer than the pass.
            target.end_pass()
            if target.device.type == "cuda":
                torch.cuda.synchronize(target.device)
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def machine_and_model(target: TransformersTarget, config: TargetConfig) -> dict[str, Any]:
    """What the time of a pass depends on: measurements that are kept must match all of it."""
    gpu = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else None
    return {
        "model": digest_of(config.model_path),
        "dtype": config.dtype,
        "device": gpu or f"{platform.machine()} {processor()} {os.cpu_count()}",
        "threads": torch.get_num_threads(),
        "stages": [config.stages, config.tensor_parallel_size],
        "torch": torch.__version__,
        "kernels": target.kernels.about,
        **({"cache": "fp8"} if config.rounds_cache else {}),
    }
