"""Levels of one tree in several pipeline stages at once: what that would take and bring, as docs/gpu-kernels.md says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.checks.gpu_sizing import GPUS, MANY_ROWS, size_up
from services.verifier.loading.model_size import shape_of
from tests.unit.cluster.test_gpu_sizing import Make, config_of, make

__all__ = ["make"]

HEAD = ["stages", "one pass", "in two", "in eight levels", "two pay from", "hits wanted", "hits seen"]
STAGES = (2, 4, 8)
# `outrider replay`, blend, tokens per pass with at most 63 and 511 nodes (docs/log.md).
TOKENS, WITH_MANY_NODES = 2.17, 2.23


def in_parts(stages: int, parts: int, stage_s: float) -> float:
    """Seconds until the last of ``parts`` has left the last stage, each taking ``stage_s`` in each stage."""
    return (stages + parts - 1) * stage_s


def followed(stages: int, parts: int, stage_s: float) -> float:
    """The same, part by part: a stage takes the next part when it is free and the stage before has finished with it."""
    free = [0.0] * stages
    for _ in range(parts):
        done = 0.0
        for stage in range(stages):
            done = free[stage] = max(done, free[stage]) + stage_s
    return free[-1]


def hits_wanted(stages: int, tokens: float) -> float:
    """How often a level must hold the target's token, so that a level at a time is as fast as a tree in one pass.

    A level at a time gives a token in each stage's time while levels hit, and the next one after all stages after a miss:
    h + (1 - h) * S stage times a token. A tree in one pass takes S / ``tokens``.
    """
    return stages * (1 - 1 / tokens) / (stages - 1)


def test_the_formula_is_what_stages_do() -> None:
    for stages in (1, *STAGES):
        for parts in (1, 2, 8):
            assert followed(stages, parts, 0.5) == in_parts(stages, parts, 0.5)
    for stages in STAGES:
        hits = hits_wanted(stages, TOKENS)
        assert hits + (1 - hits) * stages == pytest.approx(stages / TOKENS)
        # With as many hits as the tree has, a level at a time is always slower, by the stage times of its hits.
        same = 1 - 1 / TOKENS
        assert same + (1 - same) * stages == pytest.approx(stages / TOKENS + same)


def test_the_table_of_the_page(make: Make) -> None:
    """To make it anew: copy what the failing assertion shows."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    config, kind = config_of(make("70B")), GPUS["H100"]
    shape = shape_of(config)
    parameters = shape.per_layer * shape.layers + shape.others - shape.embeddings
    # Up to so many rows a pass takes as long as one row: the memory is the limit.
    free_rows = shape.read_per_pass(config) / kind.bandwidth * kind.arithmetic / (2 * parameters)
    for stages in STAGES:
        whole = shape.read_per_pass(config) / kind.bandwidth
        if stages == 8:
            found = size_up(replace(config, stages=stages), shape, kind)
            assert found.many_s == found.step_s == whole and free_rows > MANY_ROWS
        times = [1e3 * in_parts(stages, parts, whole / stages) for parts in (1, 2, 8)]
        rows = (stages + 1) / stages * free_rows
        wanted = hits_wanted(stages, TOKENS)
        numbers = [str(stages), *(f"{time:.1f} ms" for time in times), f"{rows:.0f} rows"]
        numbers += [f"{wanted:.2f}" if wanted <= 1 else "over 1", f"{1 - 1 / WITH_MANY_NODES:.2f}"]
        lines.append(f"| {' | '.join(numbers)} |")
    assert "\n".join(lines) in Path("docs/gpu-kernels.md").read_text(), "\n" + "\n".join(lines)
